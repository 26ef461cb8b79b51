"""Two processes on the CPU: same bits as one, and no image counted twice."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import QUICK, environment, safemerge

TWO = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]


def launch(launcher: list[str], cwd: Path, target: list[str]) -> subprocess.CompletedProcess[str]:
    command = [*launcher, *target, "fit", "--config", "tiny.yaml", *QUICK, *TWO]
    env = environment() | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.slow
def test_torchrun_and_fabric_equal_one_process(tmp_path: Path) -> None:
    """``safemerge`` under torchrun, under ``fabric run`` and on its own end with one hash and one matrix."""
    one = tmp_path / "one"
    one.mkdir()
    assert safemerge("fit", "--config", "tiny.yaml", *QUICK, cwd=one).returncode == 0
    expected = json.loads((one / "runs/tiny/version_0/report.json").read_text())
    launchers = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        "fabric": [str(Path(sys.executable).with_name("fabric")), "run", "--devices", "2", "--accelerator", "cpu"],
    }
    script = Path(__file__).parent.parent.parent / "safemerge_pl" / "cli.py"
    for name, launcher in launchers.items():
        cwd = tmp_path / name
        cwd.mkdir()
        target = ["-m", "safemerge_pl"] if name == "torchrun" else [str(script)]
        run = launch(launcher, cwd, target)
        assert run.returncode == 0, run.stdout + run.stderr
        found = json.loads((cwd / "runs/tiny/version_0/report.json").read_text())
        assert found["merged"] == expected["merged"]
        assert [step["accuracies"] for step in found["steps"]] == [step["accuracies"] for step in expected["steps"]]
        assert [path.name for path in (cwd / "runs/tiny").iterdir()] == ["version_0"]
        assert run.stdout.count("1/2 font_category") == 1
        shutil.rmtree(cwd)
