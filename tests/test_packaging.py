"""What is in the wheel, and that it runs from there."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(folder), "-q"], check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_is_complete(wheel: Path) -> None:
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


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment that has the wheel, and this one's libraries but not its package."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    _run_in(folder, *PIP, "--python", programs / "python", "install", "-q", "--no-deps", wheel)
    site = Path(
        _run_in(folder, programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    # what such a file names comes last on the path, and .pth files in there, an editable install's say, are not read
    (site / "libraries.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    return programs


def _run_in(folder: Path, *command: str | Path) -> str:
    """What a program prints; it sees nothing of the checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([*map(str, command)], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
def test_the_wheel_checks_and_folds(installed: Path, tmp_path: Path) -> None:
    code = (
        "import safemerge_pl; from safemerge_pl.cli import main; print(safemerge_pl.__file__);"
        "main(['check', '--config', 'quickstart.yaml']); from safemerge_pl.zoo import FILES;"
        "places = ['--pretrained', str(FILES / 'model'), '--incoming', str(FILES / 'experts' / 'mnist')];"
        "main(['fold', *places, '--output', 'out', '--method', 'TaskArithmetic'])"
    )
    printed = _run_in(tmp_path, installed / "python", "-c", code)
    assert Path(printed.splitlines()[0]).is_relative_to(installed.parent)
    assert "no problem found" in printed
    assert "folded 'mnist' as task 1" in printed
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_wheel_runs_the_quickstart(installed: Path, tmp_path: Path) -> None:
    """As a user starts it, on few images and with few rows: what it prints, and what it leaves in its own folder."""
    less = {
        "data.init_args.tasks": "[weather,clipart_category]",
        "data.init_args.controls": "[probe3_clipart_photos]",
        "references.individual": "false",
        "compare.methods": "[]",
        "trainer.limit_val_batches": "1",
    }
    options = [part for name, value in less.items() for part in (f"--{name}", value)]
    printed = _run_in(tmp_path, installed / "safemerge", "fit", "--config", "quickstart.yaml", *options)
    for said in ("pretrained", "1/2 weather", "2/2 clipart_category", "Pre-trained", "SAFE-Merge, bound 0.035", "BWT"):
        assert said in printed
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    folder = tmp_path / "runs" / "quickstart" / "version_0"
    assert {"config.yaml", "report.md", "matrix.png", "stream.png", "checkpoints"} <= {*os.listdir(folder)}
    report = json.loads((folder / "report.json").read_text())
    assert [step["task"] for step in report["steps"]] == ["weather", "clipart_category"]
    merged = {"config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json", "README.md"}
    assert merged <= {*os.listdir(folder / "merged")}


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
