"""The everyday job: one model folded in, or several at once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from command_line import safemerge
from tiny import tower, tuned
from transformers import CLIPModel

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.commands.fold import bound_drift, fold_once
from safemerge_pl.folding.processes import Processes
from safemerge_pl.live import LiveMerger
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, SafeShare
from safemerge_pl.output.files import MASTER_FILE
from safemerge_pl.scoring import FileGauge
from safemerge_pl.zoo import FILES


def test_several_models_are_folded_in_order_or_not_at_all(tmp_path: Path) -> None:
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    sources = []
    for seed in (1, 2):
        sources.append(str(tiny.folder_of(tmp_path / f"v{seed}.task{seed}", tuned(tower(), seed))))
    broken = tuned(tower(), 3)
    broken[tiny.FC1][0, 0] = float("nan")
    bad = str(tiny.folder_of(tmp_path / "bad", broken))
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"task 'bad': .* NaN"):
        fold_once(str(base), [*sources, bad], str(out))
    assert not out.exists()
    merger = fold_once(str(base), sources, str(out))
    assert merger.tasks == ["v1.task1", "v2.task2"]
    twin = ContinualMerger(base)
    for source in sources:
        twin.fold(source, source)
    assert merger.fingerprint() == twin.fingerprint()


@pytest.mark.parametrize(
    ("incoming", "task", "message"),
    [
        ([], None, "`incoming` is empty"),
        (["a/x", "b/X"], None, "two incoming models have the name 'x'"),
        (["a", "b"], "one", "`task` has 1 names for 2 incoming models"),
        (["a"], ["one", "two"], "`task` has 2 names for 1 incoming models"),
    ],
)
def test_lists_that_do_not_fit_are_refused_first(incoming: list[str], task: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        fold_once("no/such", incoming, str(tmp_path / "out"), task=task)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_output_is_refused_before_a_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    tiny.refuse_to_read(monkeypatch)
    (tmp_path / "file").write_text("x")
    for output in (tmp_path / "file", base, base / "in", tmp_path):
        with pytest.raises(CheckpointError, match="name a"):
            fold_once(str(base), str(base), str(output))


def test_lists_on_the_command_line(tmp_path: Path) -> None:
    """One line of result with the hash, the model's name in the card, no trace of a failed attempt."""
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    for seed in (1, 2):
        tiny.folder_of(tmp_path / f"task{seed}", tuned(tower(), seed))
    command = [sys.executable, "-m", "safemerge_pl", "fold", "--pretrained", "base", "--output", "out"]
    args = ["--incoming", "[task1,task2]", "--task", "[a,b]", "--max_shard_size", "1KB", "--dtype", "bfloat16"]
    run = subprocess.run([*command, *args], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    state = json.loads((tmp_path / "out" / "merge_state.json").read_text())
    assert state["tasks"] == ["a", "b"]
    assert f"merged model: out, 2 tasks, SHA-256 {state['merged']}" in run.stdout.splitlines()[-1]
    assert "command: `safemerge fold --pretrained base --output out" in (tmp_path / "out" / "README.md").read_text()
    index = MASTER_FILE + ".index.json"
    assert (tmp_path / "out" / index).exists()
    assert ContinualMerger.load(tmp_path / "out", base).fingerprint() == state["merged"]
    assert base.exists()


def test_a_fold_in_low_memory_writes_the_same_folder(tmp_path: Path) -> None:
    """Yesterday's merge is read from its own folder, which today's replaces."""
    base, experts = tiny.tower("vision_model."), []
    pretrained = tiny.folder_of(tmp_path / "base", base, config={"model_type": "clip"})
    for seed in (1, 2):
        experts.append(str(tiny.folder_of(tmp_path / f"expert{seed}", tiny.tuned(base, seed))))
    hashes = []
    for low_memory in (False, True):
        out, places = str(tmp_path / f"out{low_memory}"), {"pretrained": str(pretrained), "low_memory": low_memory}
        fold_once(**places, incoming=experts[0], output=out, method=tiny.fast_method())  # type: ignore[arg-type]
        (tmp_path / f".out{low_memory}.work").mkdir()  # left by a process that was killed
        fold_once(**places, incoming=experts[1], output=out, merged=out)  # type: ignore[arg-type]
        hashes.append({path.name: path.read_bytes() for path in Path(out).iterdir() if path.suffix == ".safetensors"})
        assert len(ContinualMerger.load(out, pretrained).tasks) == 2
    assert hashes[0] == hashes[1]
    assert not list(tmp_path.glob(".*"))


def test_it_waits_for_neither_lightning_nor_transformers() -> None:
    code = (
        "import sys, safemerge_pl.commands.fold;"
        "sys.exit(', '.join({'lightning', 'torchmetrics', 'transformers', 'datasets'} & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"imported: {run.stderr}"


def test_fold_today_and_tomorrow(tmp_path: Path) -> None:
    """One model a day on the command line ends with the bits of one run in Python."""
    base = ["fold", "--pretrained", str(FILES / "model"), "--output", "out"]
    first = safemerge(
        *base, "--incoming", str(FILES / "experts/mnist"), "--method", "OPCM", "--method.alpha", "0.4", cwd=tmp_path
    )
    assert first.returncode == 0, first.stderr
    assert "folded 'mnist' as task 1" in first.stdout
    again = safemerge(*base, "--incoming", str(FILES / "experts/flags"), cwd=tmp_path)
    assert again.returncode == 1
    assert "continue it with --merged out" in again.stderr
    flags = ["--incoming", str(FILES / "experts/flags"), "--merged", "out", "--task", "Flags", "--dtype", "float32"]
    second = safemerge(*base, *flags, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    merger = ContinualMerger(FILES / "model", OPCM(alpha=0.4))
    for task in ("mnist", "flags"):
        merger.fold(FILES / "experts" / task, task)
    state = json.loads((tmp_path / "out" / "merge_state.json").read_text())
    assert state["merged"] == merger.fingerprint()
    assert state["tasks"] == ["mnist", "Flags"]
    assert state["method"]["init_args"] == {"alpha": 0.4, "zero_diagonal": False}


def test_a_bound_on_the_drift_is_kept_from_day_to_day(tmp_path: Path) -> None:
    """The model is run beside its files; in the end stand the bits of a merger in Python with the same gauge."""
    model, experts = str(FILES / "model"), FILES / "experts"
    places = ["fold", "--pretrained", model, "--output", "out"]
    method = ["--method", "SafeShare", "--method.scoring_rank", "21", "--method.shared_rank", "32"]
    bound = ["--max_drift", "0.002", "--max_response", "null"]
    first = safemerge(*places, "--incoming", str(experts / "mnist"), *method, *bound, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    second = safemerge(*places, "--incoming", str(experts / "clipart_category"), "--merged", "out", cwd=tmp_path)
    assert second.returncode == 0, second.stderr

    out, gauge = tmp_path / "out", FileGauge(model)
    twin = ContinualMerger(model, SafeShare(0.5, 21, 32), max_response=None, max_drift=0.002, gauge=gauge)
    for task, run in (("mnist", first), ("clipart_category", second)):
        report = twin.fold(experts / task, task)
        deployed = f"{report.scale:.1%} of the accumulated vector is deployed"
        assert f"bound: {deployed} (drift {report.drift:.2%}, at most 0.20%)" in run.stdout
    assert json.loads((out / "merge_state.json").read_text())["merged"] == twin.state_dict()["merged"]
    assert report.scale < 1
    assert f"{deployed} (drift {report.drift:.2%})" in safemerge("info", "out", cwd=tmp_path).stdout
    assert f"{deployed} (response {report.response:.4f}, drift {report.drift:.2%})." in str(report)
    loaded = ContinualMerger.load(out, model, gauge=gauge)
    assert loaded.fingerprint() == twin.fingerprint()
    assert gauge(loaded.merged_parameters()) == report.drift

    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for other in (None, 0.01):
        with pytest.raises(CheckpointError, match=f"`max_drift` 0.002, not {other}; use the same"):
            fold_once(model, str(experts / "flags"), str(out), str(out), max_drift=other)
    with pytest.raises(CheckpointError, match="give the `gauge` that measures it"):
        ContinualMerger.load(out, model)
    with pytest.raises(CheckpointError, match="go on with `safemerge fold`"):
        LiveMerger.load(out, CLIPModel.from_pretrained(model))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    for name in ("max_drift", "max_response"):
        (out / "merge_state.json").write_text(
            json.dumps(json.loads(before["merge_state.json"]) | {name: [0.1]}), encoding="utf-8"
        )
        with pytest.raises(CheckpointError, match=f"merge_state.json is damaged: `{name}` must be a"):
            fold_once(model, str(experts / "flags"), str(out), str(out))


def test_a_bound_on_the_drift_that_cannot_hold(tmp_path: Path) -> None:
    """Refused before a weight is folded: over processes, for what the features do not show."""
    model, expert = str(FILES / "model"), str(FILES / "experts/mnist")
    together = Processes(shared=False)
    together.count, together.apart = 2, True
    with pytest.raises(CheckpointError, match="holds on one process only"):
        bound_drift(model, None, 0.01, {"processes": together, "device": "cpu"})
    with pytest.raises(CheckpointError, match="would not see 3 of the merged parameters"):
        fold_once(model, model, str(tmp_path / "out"), layers=["text_model*fc1.weight"], max_drift=0.01)
    with pytest.raises(CheckpointError, match="it is a clip_vision_model"):
        fold_once(expert, expert, str(tmp_path / "out"), max_drift=0.01)
    with pytest.raises(ValueError, match="above 0 and below 2"):
        fold_once(model, expert, str(tmp_path / "out"), max_drift=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--incoming", "gone"], "gone does not exist."),
        (["--incoming", "EXPERT", "--merged", "gone"], "gone holds no merge_state.json"),
        (["--incoming", "EXPERT", "--method.keep_ratio", "2"], "`keep_ratio` must be in [0, 1]"),
        (["--incoming", "EXPERT", "--layers", "[image_model.*]"], "matches none of the"),
        (["--incoming", "EXPERT", "--layers", "[text_model.*]"], "lacks 20 of 20 tensors to merge"),
        (["--incoming", "MODEL/tokenizer.json"], "tokenizer.json is not a checkpoint"),
    ],
)
def test_fold_refuses_in_one_sentence(args: list[str], message: str, tmp_path: Path) -> None:
    places = {"EXPERT": str(FILES / "experts/mnist"), "MODEL/tokenizer.json": str(FILES / "model/tokenizer.json")}
    given = [places.get(argument, argument) for argument in args]
    run = safemerge("fold", "--pretrained", str(FILES / "model"), "--output", "out", *given, cwd=tmp_path)
    assert run.returncode in (1, 2), run.stdout
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []
