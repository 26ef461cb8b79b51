"""Accuracies at the boundaries of a training loop: where they come from, what is logged and written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from event_files import scalars
from lightning.pytorch.loggers import TensorBoardLogger
from loops import EPOCHS, TASKS, Classifier, Tasks, Watch, batches, encoder, live

from safemerge_pl.callbacks import MergedModelWriter, StreamProgress, StreamReport
from safemerge_pl.merger import ContinualMerger

Make = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


def accuracies(module: Classifier, tasks: int = 3) -> dict[str, float]:
    """Counted by hand."""
    found = {}
    for task, name in zip(range(tasks), TASKS, strict=False):
        pixels, labels = batches(task).dataset.tensors  # type: ignore[attr-defined]
        with torch.no_grad():
            found[name] = (module(pixels).argmax(1) == labels).float().mean().item()
    return found


class Named(Classifier):
    """Logs one name a task."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        right = (self(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log(f"val/{TASKS[dataloader_idx]}/acc", right, add_dataloader_idx=False)


class ByHand(L.Callback):
    """Counts at every boundary, after the merged weights are in place."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch % EPOCHS == EPOCHS - 1:
            found = accuracies(pl_module)
            self.rows.append({name: found[name] for name in TASKS[: len(self.rows) + 1]})


@pytest.mark.parametrize("way", ["loaders", "names", "function"])
def test_the_matrix_is_what_one_counts_by_hand(way: str, make_trainer: Make) -> None:
    """K1 to K3, traps 5, 12: from logged metrics of a loader a task, of a name a task, or from a function."""
    options: dict[str, Any] = {
        "loaders": {"metric": "val_acc"},
        "names": {"metric": "val/{task}/acc"},
        "function": {"score": lambda trainer, module: accuracies(module)},
    }[way]
    merge, count = live(tasks=TASKS, **options), ByHand()
    module = Named() if way == "names" else Classifier()
    make_trainer(merge, count, max_epochs=6).fit(module, Tasks())
    assert merge.live is not None
    assert merge.live.scores.rows == count.rows
    assert len(count.rows) == 3
    last = merge.live.scores.scores(TASKS)
    assert last["ACC"] == pytest.approx(sum(count.rows[2].values()) / 3)
    assert last["BWT"] == pytest.approx(
        (count.rows[2]["a"] - count.rows[0]["a"] + count.rows[2]["b"] - count.rows[1]["b"]) / 2
    )


def test_a_function_sees_merged_weights_in_evaluation_mode_without_gradients(make_trainer: Make) -> None:
    seen: list[dict[str, torch.Tensor]] = []

    def score(trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        assert isinstance(module, Classifier)
        assert not module.training
        assert not torch.is_grad_enabled()
        seen.append(encoder(module))
        return dict.fromkeys(["a", "b", "c", "later"], 0.5)

    class Frozen(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            modes.append((self.training, self.encoder.training))

    modes: list[tuple[bool, bool]] = []
    merge, watch, module = live(boundary="fit", tasks=TASKS, score=score), Watch(), Frozen()
    module.encoder.eval()  # as somebody does who freezes statistics
    make_trainer(watch, merge, max_epochs=2).fit(module, batches(0))
    assert all(torch.equal(seen[0][name], tensor) for name, tensor in encoder(module).items())
    assert modes == [(True, False)] * 4
    assert (module.training, module.encoder.training) == (True, False)


def test_report_and_tensorboard_show_training_and_stream(make_trainer: Make, tmp_path: Path) -> None:
    """K9, O6, and H where control sets are given: curves of the training beside the scores of the merge."""

    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss)
            return loss

    def score(trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        assert isinstance(module, Classifier)
        return {**accuracies(module), "probe": 0.5}

    logger = TensorBoardLogger(tmp_path)
    merge = live(tasks=TASKS, score=score, controls=["probe"])
    before, after = StreamReport(), StreamReport(folder=str(tmp_path / "copy"))  # wherever it stands in the list
    after.__class__ = type("Copy", (StreamReport,), {})
    make_trainer(before, merge, after, logger=logger, max_epochs=6).fit(Logs(), Tasks())
    found = scalars(Path(logger.log_dir))
    assert len(found["train/loss"]) == 12
    assert [step for step, _ in found["stream/ACC"]] == [step for step, _ in found["stream/H"]] == [1, 2, 3]
    assert [step for step, _ in found["stream/BWT"]] == [2, 3]
    assert [value for _, value in found["control/probe/acc"]] == [0.5] * 3
    assert [step for step, _ in found["task/c/acc"]] == [3]
    assert "stream/matrix" in found
    assert len(found["recovery/02_b"]) == 4
    assert "hp/H" in found
    for folder in (Path(logger.log_dir), tmp_path / "copy"):
        assert {"report.json", "report.md", "matrix.png", "stream.png"} <= {path.name for path in folder.iterdir()}
        report = json.loads((folder / "report.json").read_text())
        assert report["tasks"] == TASKS
        assert report["controls"] == ["probe"]
        assert [step["task"] for step in report["steps"]] == TASKS
        assert report["steps"][2]["source"] == "trained until step 12"
        assert merge.live is not None
        assert report["steps"][2]["accuracies"] == merge.live.scores.rows[2]
        assert report["merged"] == merge.reports[2].merged


def test_the_report_of_one_fit_a_task_grows(make_trainer: Make, tmp_path: Path) -> None:
    report, module = StreamReport(folder=str(tmp_path)), Classifier()
    merge = live(boundary="fit", score=lambda trainer, module: {f"task{n}": 0.25 * n for n in (1, 2)})
    for number in range(2):
        make_trainer(report, merge, max_epochs=1).fit(module, batches(number))
    content = json.loads((tmp_path / "report.json").read_text())
    assert [step["accuracies"] for step in content["steps"]] == [{"task1": 0.25}, {"task1": 0.25, "task2": 0.5}]
    assert content["tasks"] == ["task1", "task2"]
    assert content["steps"][1]["BWT"] == 0.0


def test_the_other_callbacks_go_along(make_trainer: Make, tmp_path: Path, capsys: Any) -> None:
    """The stream's own progress bar and writer work in a training loop, too."""
    writer = MergedModelWriter(folder=str(tmp_path / "out"))
    merge, module = live(boundary="fit"), Classifier()
    base = encoder(module)
    make_trainer(merge, writer, StreamProgress(), enable_progress_bar=True, max_epochs=2).fit(
        module, batches(0), batches(0)
    )
    assert "merged model" in capsys.readouterr().out
    assert ContinualMerger.load(tmp_path / "out", base).tasks == ["task1"]


def test_options_can_stand_in_a_configuration() -> None:
    """O2, O8: names, types and help of the live options reach the command line."""
    import jsonargparse

    from safemerge_pl.callbacks import MergeCallback, SAFEMergeCallback

    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--merge", type=MergeCallback)
    options = ["--merge.epochs_per_task=3", "--merge.rest=keep", "--merge.tasks=[a, b]", "--merge.keep_ratio=0.25"]
    config = parser.parse_args([f"--merge={SAFEMergeCallback.__module__}.SAFEMergeCallback", *options])
    build = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before 4.50
    merge = build(config).merge
    assert merge.live.epochs_per_task == 3
    assert merge.live.planned == ["a", "b"]
    again = parser.parse_object(json.loads(parser.dump(config, format="json")))
    assert build(again).merge.live.options["rest"] == "keep"
