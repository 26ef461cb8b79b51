"""What is in the wheel, and that it runs from there."""

import ast
import importlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

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
    for text in (ROOT / "LICENSES").iterdir():
        assert any(name.endswith(f"licenses/LICENSES/{text.name}") for name in names)
    target = tmp_path / "site"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(target), str(wheel)], check=True)
    code = (
        "import sys, safemerge_pl; from safemerge_pl.cli import main;"
        f"assert safemerge_pl.__file__.startswith({str(target)!r}), safemerge_pl.__file__;"
        "main(['check', '--config', 'quickstart.yaml']); from safemerge_pl.zoo import FILES;"
        "places = ['--pretrained', str(FILES / 'model'), '--incoming', str(FILES / 'experts' / 'mnist')];"
        "main(['fold', *places, '--output', 'out', '--method', 'TaskArithmetic'])"
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
    assert "folded 'mnist' as task 1" in run.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()


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


def _project() -> dict[str, Any]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # pytest has it there
    project: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def test_the_licence_names_what_is_in_the_wheel() -> None:
    """Every part of the expression has its text and stands in the notice for something that is shipped."""
    from packaging.licenses import canonicalize_license_expression

    expression = _project()["license"]
    assert canonicalize_license_expression(expression) == expression
    parts = expression.split(" AND ")
    assert {path.stem for path in (ROOT / "LICENSES").glob("*.txt")} == {*parts} - {"Apache-2.0"}
    shipped = (ROOT / "NOTICE").read_text().partition("\n2. Works")[0].partition("\n1. Works")[2]
    assert set(re.findall(r"\b(?:CC-BY(?:-SA)?|CC0|OFL|Apache)-\d\.\d|\bMIT\b", shipped)) == set(parts)


def test_every_source_of_a_set_is_in_the_notice() -> None:
    """By the name of its package; those of the images that are shipped in the first part."""
    notice = (ROOT / "NOTICE").read_text()
    shipped = notice.partition("\n2. Works")[0]
    sets = json.loads((ROOT / "safemerge_pl/zoo/files/zoo.json").read_text())["sets"]
    for name, about in sets.items():
        assert name in shipped
        packages = re.findall(r"@iconify-json/([\w-]+)@|([\w-]+-(?:png|mnist))\b", about["source"])
        for package in (icon or other for icon, other in packages):
            assert re.search(rf"(?<![\w-]){package.removeprefix('dataset-')}(?![\w-])", notice, re.IGNORECASE), package
            if about["kind"] == "probe":
                assert re.search(rf"(?<![\w-]){package}(?![\w-])", shipped), package
    unseen = re.search(r"in test: \[(.*)\]", sets["weather"]["split"])
    assert unseen is not None
    for package in re.findall(r"\w+", unseen[1]):
        assert f"({package})" in shipped


def test_the_code_is_of_the_oldest_python() -> None:
    minors = [text.rpartition(" ")[2] for text in _project()["classifiers"] if ":: 3." in text]
    assert _project()["requires-python"] == f">={minors[0]}"
    oldest = tuple(map(int, minors[0].split(".")))
    for path in (ROOT / "safemerge_pl").rglob("*.py"):
        ast.parse(path.read_text(), str(path), feature_version=oldest)


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


def test_no_module_of_unix_is_needed() -> None:
    """Windows has none of them, nor these functions; only this package does without: others import their part."""
    rooms = "merger, study, live, module, hf_trainer, callbacks, commands.fold, commands.fit, commands.check"
    code = (
        f"{_WITHOUT_UNIX}\nimport importlib, os, tempfile, torch\n"
        f"for name in {rooms!r}.split(', '): importlib.import_module(f'safemerge_pl.{{name}}')\n"
        "for name in ('sched_getaffinity', 'getuid', 'fork', 'killpg'): delattr(os, name)\n"
        "import safemerge_pl as sm, safemerge_pl.output.locks as locks\n"
        "assert locks.fcntl is None\n"
        "name, eye = 'encoder.layers.0.mlp.fc1.weight', torch.eye(4)\n"
        "merger = sm.ContinualMerger({name: eye}, sm.SafeMerge(scoring_rank=2, recovery_rank=1, task_rank=1))\n"
        "merger.fold({name: eye + 0.1}, 'a')\n"
        "folder = merger.save(os.path.join(tempfile.mkdtemp(), 'out'))\n"
        "assert sm.ContinualMerger.load(folder, {name: eye}).fingerprint() == merger.fingerprint()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
