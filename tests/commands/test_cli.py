"""The command line as a person uses it: in a process of its own, reading what it prints."""

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

NAMES = sorted(path.name for path in config_folder().glob("*.yaml"))
CONFIGS = [name for name in NAMES if not name.startswith(("study", "clip"))]  # the latter: test_benchmark_data.py
OFFLINE = [name for name in CONFIGS if "pretrained: zoo" in (config_folder() / name).read_text()]
STUDIES = [name for name in NAMES if name.startswith("study")]


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return content


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys; from safemerge_pl.cli import main; main(['--help']);"
        "sys.exit(int(bool({'torch', 'lightning', 'transformers', 'matplotlib', 'datasets'} & set(sys.modules))))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "safemerge fit" in run.stdout
    assert "quickstart.yaml" in run.stdout


def test_version_and_unknown_verb(tmp_path: Path) -> None:
    assert safemerge("--version", cwd=tmp_path).stdout.strip() == "0.1.0"
    run = safemerge("mrege", cwd=tmp_path)
    assert run.returncode == 2
    assert "there is no verb 'mrege'" in run.stderr


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


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_read_whole(name: str) -> None:
    """Parsed, built, and every cell of it constructed."""
    code = (
        "import sys; from safemerge_pl.study import Study; from safemerge_pl.cli import main;"
        "Study.run = lambda self: print(len(self.cells()), [f.file for f in self.figures]);"
        f"main(['study', '--config', '{name}'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False)
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


@pytest.mark.slow
def test_a_run_leaves_everything_and_its_saved_config_repeats_it(tmp_path: Path) -> None:
    """O1, O2, O7: same hash from the saved configuration; no carriage return in a log; the folder's content."""
    first = safemerge("fit", "--config", "tiny.yaml", *QUICK, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "\r" not in first.stdout
    assert "Traceback" not in first.stderr
    folder = tmp_path / "runs" / "tiny" / "version_0"
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "report.json", "report.md", "matrix.png", "stream.png", "merged", "checkpoints"} <= names
    lines = [line for line in first.stdout.splitlines() if "/2 " in line]
    assert len(lines) == 2
    assert "weather" in lines[1]
    assert "BWT" in lines[1]
    again = safemerge("fit", "--config", str(folder / "config.yaml"), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert report(folder)["merged"] == report(tmp_path / "runs" / "tiny" / "version_1")["merged"]
    checkpoint = folder / "checkpoints" / "epoch=01.ckpt"
    scored = safemerge("validate", "--config", "tiny.yaml", *QUICK, "--ckpt_path", str(checkpoint), cwd=tmp_path)
    assert scored.returncode == 0, scored.stderr
    final = report(folder)["steps"][-1]
    assert f"{100 * final['H']:.1f}" in scored.stdout


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """I4, C12, I15: SIGKILL as soon as the first checkpoint is there; --ckpt_path last goes on."""
    whole = safemerge("fit", "--config", "tiny.yaml", *QUICK, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
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
    one, two = report(tmp_path / "runs/tiny/version_0"), report(killed / "runs/tiny/version_1")
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
    assert not list(tmp_path.glob("**/merged"))


def test_check_lists_every_problem_at_once(tmp_path: Path) -> None:
    args = [MERGE + "experts", '{"weather": "gone", "clipart_category": "also/gone/now"}']
    run = safemerge("check", "--config", "tiny.yaml", *args, cwd=tmp_path)
    assert run.returncode == 1
    assert "task 'weather': gone does not exist." in run.stderr
    assert "task 'clipart_category': also/gone/now does not exist." in run.stderr
    assert "2 problems found" in run.stderr


def test_processes_that_the_trainer_does_not_know_of_are_refused(tmp_path: Path) -> None:
    """Trap 37."""
    command = [sys.executable, "-m", "safemerge_pl", "fit", "--config", "tiny.yaml"]
    extra = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    run = subprocess.run(command, cwd=tmp_path, env=environment() | extra, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert (
        "2 processes were started, but the trainer uses 1; add --trainer.devices 2 --trainer.strategy ddp."
        in run.stderr
    )


ZOO = config_folder().parent / "safemerge_pl" / "zoo" / "files"


def test_fold_today_and_tomorrow(tmp_path: Path) -> None:
    """One model a day on the command line ends with the bits of one run in Python."""
    from safemerge_pl.merger import ContinualMerger
    from safemerge_pl.methods import OPCM

    base = ["fold", "--pretrained", str(ZOO / "model"), "--output", "out"]
    first = safemerge(
        *base, "--incoming", str(ZOO / "experts/mnist"), "--method", "OPCM", "--method.alpha", "0.4", cwd=tmp_path
    )
    assert first.returncode == 0, first.stderr
    assert "folded 'mnist' as task 1" in first.stdout
    again = safemerge(*base, "--incoming", str(ZOO / "experts/flags"), cwd=tmp_path)
    assert again.returncode == 1
    assert "continue it with --merged out" in again.stderr
    flags = ["--incoming", str(ZOO / "experts/flags"), "--merged", "out", "--task", "Flags", "--dtype", "float32"]
    second = safemerge(*base, *flags, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    merger = ContinualMerger(ZOO / "model", OPCM(alpha=0.4))
    for task in ("mnist", "flags"):
        merger.fold(ZOO / "experts" / task, task)
    state = json.loads((tmp_path / "out" / "merge_state.json").read_text())
    assert state["merged"] == merger.fingerprint()
    assert state["tasks"] == ["mnist", "Flags"]
    assert state["method"]["init_args"] == {"alpha": 0.4, "zero_diagonal": False}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--incoming", "gone"], "gone does not exist."),
        (["--incoming", "EXPERT", "--merged", "gone"], "gone holds no merge_state.json"),
        (["--incoming", "EXPERT", "--method.keep_ratio", "2"], "`keep_ratio` must be in [0, 1]"),
        (["--incoming", "EXPERT", "--layers", "[text_model.*]"], "matches none of the"),
        (["--incoming", "MODEL/tokenizer.json"], "tokenizer.json is not a checkpoint"),
    ],
)
def test_fold_refuses_in_one_sentence(args: list[str], message: str, tmp_path: Path) -> None:
    places = {"EXPERT": str(ZOO / "experts/mnist"), "MODEL/tokenizer.json": str(ZOO / "model/tokenizer.json")}
    given = [places.get(argument, argument) for argument in args]
    run = safemerge("fold", "--pretrained", str(ZOO / "model"), "--output", "out", *given, cwd=tmp_path)
    assert run.returncode in (1, 2), run.stdout
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []
