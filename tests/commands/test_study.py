"""``study``: every study that comes along is read whole, and a mistyped one is refused."""

import subprocess
from pathlib import Path

import pytest
import yaml
from command_line import environment, python, safemerge

from safemerge_pl.runtime.configs import config_folder

NAMES = sorted(path.name for path in config_folder().glob("*.yaml"))


STUDIES = [name for name in NAMES if name.startswith("study")]


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_read_whole(name: str) -> None:
    """Parsed, built, every cell of it constructed, and found fit to be measured."""
    code = (
        "import sys; from safemerge_pl.study import Study; from safemerge_pl.cli import main;"
        "Study.run = lambda self: print(len(self.cells()), len(self.check()));"
        f"main(['study', '--config', '{name}'])"
    )
    run = subprocess.run([*python(), "-c", code], capture_output=True, text=True, env=environment(), check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[0]) >= 4


@pytest.mark.parametrize(
    ("change", "message"),
    [("NoSuchMethod", "NoSuchMethod"), ("{class_path: OPCM, init_args: {alfa: 0.5}}", "alfa")],
)
def test_a_study_with_an_unknown_method_or_parameter(change: str, message: str, tmp_path: Path) -> None:
    content = yaml.safe_load((config_folder() / "study_ablation.yaml").read_text())
    content["rows"][0]["method"] = yaml.safe_load(change)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    run = safemerge("study", "--config", "mine.yaml", cwd=tmp_path)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
