"""What is in the wheel, and that it runs from there."""

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
