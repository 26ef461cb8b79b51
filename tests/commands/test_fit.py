"""``fit``, ``validate`` and ``test`` as a person uses them: in a process of their own, reading what they print."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import QUICK, environment, safemerge

from safemerge_pl.runtime.configs import config_folder

Run = subprocess.CompletedProcess[str]

NAMES = sorted(path.name for path in config_folder().glob("*.yaml"))


CONFIGS = [name for name in NAMES if not name.startswith(("study", "clip"))]  # the latter: test_benchmark_data.py


OFFLINE = [name for name in CONFIGS if "pretrained: zoo" in (config_folder() / name).read_text()]


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return content


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_parses_and_passes_the_check(name: str, tmp_path: Path) -> None:
    """A configuration whose model is on the hub is parsed, and checked on small stand-ins elsewhere."""
    printed = safemerge("fit", "--config", name, "--print_config", cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    assert yaml.safe_load(printed.stdout)["trainer"]["callbacks"]
    if name not in OFFLINE:
        return
    checked = safemerge("check", "--config", name, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "no problem found" in checked.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """What a run of two tasks printed, and where."""
    place = tmp_path_factory.mktemp("first")
    run = safemerge("fit", "--config", "tiny.yaml", *QUICK, cwd=place)
    assert run.returncode == 0, run.stderr
    return run, place


@pytest.mark.slow
def test_a_run_leaves_everything_and_its_saved_config_repeats_it(whole: tuple[Run, Path]) -> None:
    """Same hash from the saved configuration; no carriage return in a log; the folder's content."""
    first, place = whole
    assert "\r" not in first.stdout
    assert "Traceback" not in first.stderr
    folder = place / "runs" / "tiny" / "version_0"
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "report.json", "report.md", "matrix.png", "stream.png", "merged", "checkpoints"} <= names
    lines = [line for line in first.stdout.splitlines() if "/2 " in line]
    assert len(lines) == 2
    assert "weather" in lines[1]
    assert "BWT" in lines[1]
    again = safemerge("fit", "--config", str(folder / "config.yaml"), cwd=place)
    assert again.returncode == 0, again.stderr
    assert report(folder)["merged"] == report(place / "runs" / "tiny" / "version_1")["merged"]
    checkpoint = folder / "checkpoints" / "epoch=01.ckpt"
    scored = safemerge("validate", "--config", "tiny.yaml", *QUICK, "--ckpt_path", str(checkpoint), cwd=place)
    assert scored.returncode == 0, scored.stderr
    final = report(folder)["steps"][-1]
    assert f"{100 * final['H']:.1f}" in scored.stdout


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_bits(whole: tuple[Run, Path], tmp_path: Path) -> None:
    """SIGKILL as soon as the first checkpoint is there; --ckpt_path last goes on."""
    killed = tmp_path / "killed"
    killed.mkdir()
    command = [sys.executable, "-m", "safemerge_pl", "fit", "--config", "tiny.yaml", *QUICK]
    process = subprocess.Popen(
        command, cwd=killed, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while not list(killed.glob("runs/tiny/version_0/checkpoints/*.ckpt")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "runs" / "tiny" / "version_0" / "merged").exists()
    resumed = safemerge("fit", "--config", "tiny.yaml", *QUICK, "--ckpt_path", "last", cwd=killed)
    assert resumed.returncode == 0, resumed.stderr
    assert "1 of them merged before" in resumed.stdout
    one, two = report(whole[1] / "runs/tiny/version_0"), report(killed / "runs/tiny/version_1")
    assert one["merged"] == two["merged"]
    assert [step["accuracies"] for step in one["steps"]] == [step["accuracies"] for step in two["steps"]]


MERGE = "--trainer.callbacks.init_args."


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([MERGE + "keep_ratio", "1.5"], 1, "`keep_ratio` must be in [0, 1], got 1.5."),
        ([MERGE + "scoring_rank", "0"], 1, "`scoring_rank` must be at least 1, got 0."),
        ([MERGE + "lr", "0"], 1, "`lr` must be a finite number above 0"),
        ([MERGE + "keep", "middle"], 2, "middle"),
        (["--data.init_args.tasks", "[minst]"], 1, "the zoo has no set 'minst'; did you mean 'mnist'?"),
        (["--data.init_args.tasks", "[]"], 1, "`tasks` is empty"),
        (["--data.init_args.tasks", "[mnist,Mnist]"], 1, "has no set 'Mnist'"),
        (["--data.init_args.tasks", "[mnist,mnist]"], 1, "distinct names, got mnist more than once"),
        ([MERGE + "experts", "no/such/place"], 1, "task 'weather' has no model: no/such/place/weather not found."),
        (["--model.backbone.init_args.pretrained", "no-such-model"], 1, "no-such-model does not exist."),
        (["--trainer.precision", "bf16-true"], 1, "half precision"),
        (["--trainer.max_epochs", "3"], 1, "`max_epochs` is 3 but the stream has 2 tasks"),
        (["--ckpt_path", "last"], 1, "no checkpoint under"),
        (["--output.folder", "/proc/safemerge"], 1, "cannot be written"),
        (["--output.dtype", "int8"], 2, "int8"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], code: int, message: str, tmp_path: Path) -> None:
    run = safemerge("fit", "--config", "tiny.yaml", "--references.enabled", "false", *args, cwd=tmp_path)
    assert run.returncode == code, run.stdout + run.stderr
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert "Union subtypes" not in run.stderr
    assert not list(tmp_path.glob("**/merged"))


def test_processes_that_the_trainer_does_not_know_of_are_refused(tmp_path: Path) -> None:
    """They would be two whole runs that write into one folder."""
    command = [sys.executable, "-m", "safemerge_pl", "fit", "--config", "tiny.yaml"]
    extra = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    run = subprocess.run(command, cwd=tmp_path, env=environment() | extra, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert (
        "2 processes were started, but the trainer uses 1; add --trainer.devices 2 --trainer.strategy ddp."
        in run.stderr
    )
