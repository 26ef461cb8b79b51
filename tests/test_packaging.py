"""What is in the wheel, and that it runs from there."""

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_wheel_is_complete_and_runs(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "-q"]
    made = subprocess.run(build, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    in_tree = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "safemerge_pl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert in_tree <= names
    assert {f"safemerge_pl/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")} <= names
    assert not [name for name in names if name.startswith(("callbacks/", "tests/", "benchmarks/", "configs/"))]
    assert any(name.endswith("licenses/NOTICE") for name in names)
    target = tmp_path / "site"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(target), str(wheel)], check=True)
    code = (
        "import sys, safemerge_pl; from safemerge_pl.cli import main;"
        f"assert safemerge_pl.__file__.startswith({str(target)!r}), safemerge_pl.__file__;"
        "main(['check', '--config', 'quickstart.yaml'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(target)!r}); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "no problem found" in run.stdout


def test_one_version() -> None:
    import safemerge_pl
    from safemerge_pl.version import __version__

    assert safemerge_pl.__version__ == __version__
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text().splitlines()


def test_public_names_exist() -> None:
    import safemerge_pl

    for name in safemerge_pl.__all__:
        assert getattr(safemerge_pl, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'SafeMrge'"):
        _ = safemerge_pl.SafeMrge


def test_a_new_method_is_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every class that ``methods`` imports is a public name of the package, and every method is imported there."""
    import safemerge_pl
    from safemerge_pl import methods

    for file in sorted((ROOT / "safemerge_pl" / "methods").glob("[a-z]*.py")):
        module = importlib.import_module(f"safemerge_pl.methods.{file.stem}")
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, methods.MergeMethod):
                assert getattr(safemerge_pl, name) is value
                assert {name} <= {*safemerge_pl.__all__} & {*dir(safemerge_pl)}

    class Mine(methods.SafeMerge):
        pass

    monkeypatch.setattr(methods, "Mine", Mine, raising=False)
    monkeypatch.setattr(methods, "__all__", [*methods.__all__, "Mine"])
    assert safemerge_pl.Mine is Mine
    assert "Mine" in safemerge_pl.__all__


def test_the_face_waits_for_nothing() -> None:
    """Neither its import nor a look for one of its modules, which is how Python imports a module from a package."""
    code = (
        "import sys, safemerge_pl; from safemerge_pl import errors, runtime;"
        "assert not hasattr(safemerge_pl, 'nothing'); assert not hasattr(safemerge_pl, '__nothing__');"
        "sys.exit(', '.join({'torch', 'lightning', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


_WITHOUT_UNIX = """
import builtins
real = builtins.__import__
def refuse(name, globals=None, *rest, **more):
    if name in ("fcntl", "resource", "pwd", "grp", "termios"):
        if (globals or {}).get("__name__", "").startswith("safemerge_pl"):
            raise ModuleNotFoundError(name)
    return real(name, globals, *rest, **more)
builtins.__import__ = refuse
"""


@pytest.mark.parametrize("module", ["merger", "study", "commands.fold"])
def test_no_module_of_unix_is_needed(module: str) -> None:
    """Windows has none of them. Only this package does without: what others import here is their part for Linux."""
    code = (
        f"{_WITHOUT_UNIX}\nimport safemerge_pl.{module}, safemerge_pl.output.locks as locks\nassert locks.fcntl is None"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
