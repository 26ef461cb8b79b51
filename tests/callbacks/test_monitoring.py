"""Scores of the stream where checkpoints, early stopping and people look for them, and `metric` before it is needed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from loops import EPOCHS, TASKS, Classifier, Tasks, batches, live
from small import TASKS as STREAM

from safemerge_pl.module import ContinualMergeModule

Make = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


class Seen(L.Callback):
    """What the trainer's metrics say at the end of each epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        found = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("stream/")}
        self.rows.append(found)


def rising(accuracy: list[float]) -> Callable[..., dict[str, float]]:
    """One accuracy for all tasks at each boundary, and half of it on the probe."""
    left = iter(accuracy)

    def score(trainer: L.Trainer, module: Any) -> dict[str, float]:
        value = next(left)
        return dict.fromkeys(TASKS, value) | {"probe": value / 2}

    return score


def test_a_loop_shows_the_scores_at_boundaries_and_nan_inside_of_tasks(make_trainer: Make) -> None:
    seen = Seen()
    merge = live(tasks=TASKS, score=rising([0.5, 0.75, 0.25]), controls=["probe"])
    trainer = make_trainer(merge, seen, max_epochs=6)
    trainer.fit(Classifier(), Tasks())
    inside, at_boundary = seen.rows[0::2], seen.rows[1::2]
    for row in inside:
        assert set(row) == {"stream/ACC", "stream/Gen", "stream/H", "stream/BWT"}
        assert all(value != value for value in row.values())
    assert [row["stream/ACC"] for row in at_boundary] == [0.5, 0.75, 0.25]
    assert [row["stream/Gen"] for row in at_boundary] == [0.25, 0.375, 0.125]
    assert at_boundary[1]["stream/H"] == pytest.approx(0.5)
    assert at_boundary[0]["stream/BWT"] != at_boundary[0]["stream/BWT"]
    assert at_boundary[2]["stream/BWT"] == pytest.approx((-0.25 - 0.5) / 2)
    assert float(trainer.callback_metrics["stream/ACC"]) == 0.25  # and after `fit`


@pytest.mark.parametrize("way", ["score", "metric"])
def test_a_checkpoint_is_that_of_the_best_merge(way: str, make_trainer: Make, tmp_path: Path) -> None:
    """Not of an epoch inside of a task, though it is validated and could be saved as well."""
    best = ModelCheckpoint(tmp_path, "{epoch}-{stream/ACC:.2f}", monitor="stream/ACC", mode="max")
    seen = Seen()
    way_of_scoring = {"score": rising([0.5, 0.75, 0.25])} if way == "score" else {"metric": "val_acc"}
    trainer = make_trainer(live(tasks=TASKS, **way_of_scoring), seen, best, max_epochs=6, enable_checkpointing=True)
    trainer.fit(Classifier(), Tasks())
    values = [row["stream/ACC"] for row in seen.rows]
    wanted = max(range(6), key=lambda epoch: (values[epoch] == values[epoch], values[epoch]))
    assert wanted % EPOCHS == EPOCHS - 1
    assert best.best_model_score == pytest.approx(values[wanted])
    state = torch.load(best.best_model_path, weights_only=True)
    assert state["epoch"] == wanted
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1


def test_a_stream_of_checkpoints_shows_them_too(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """H for a checkpoint; BWT, which the first task does not have, for another."""
    best = ModelCheckpoint(tmp_path / "H", monitor="stream/H", mode="max")
    least = ModelCheckpoint(tmp_path / "BWT", monitor="stream/BWT", mode="max", save_on_train_epoch_end=True)
    seen = Seen()
    trainer = make_trainer(merge_callback(), seen, best, least, enable_checkpointing=True)
    trainer.fit(module, small_data())
    h = [row["stream/H"] for row in seen.rows]
    assert best.best_model_score == pytest.approx(max(h))
    assert least.best_model_score == pytest.approx(max(row["stream/BWT"] for row in seen.rows[1:]))
    assert {"stream/ACC", "stream/Gen", "stream/H", "stream/BWT"} <= set(trainer.callback_metrics)
    assert len(seen.rows) == len(STREAM)


@pytest.mark.parametrize(
    ("options", "monitor", "message"),
    [
        ({}, "stream/ACC", "monitors 'stream/ACC', but nothing is scored; give the merge callback `metric` or `score`"),
        ({"metric": "val_acc"}, "stream/H", "H is not defined without control sets; name some with `controls`"),
        (
            {"metric": "val_acc"},
            "stream/acc",
            "scores of a stream are stream/ACC, stream/Gen, stream/H, stream/BWT",
        ),
        ({"boundary": "fit", "score": rising([0.5])}, "stream/ACC", "`boundary='fit'` a task is merged after its last"),
    ],
)
def test_what_will_never_be_seen_is_refused_before_the_first_step(
    options: dict[str, Any], monitor: str, message: str, make_trainer: Make
) -> None:
    class Untouched(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            raise AssertionError("training began")

    late = ModelCheckpoint(monitor=monitor, mode="max")
    trainer = make_trainer(live(**options), late, max_epochs=2, enable_checkpointing=True)
    with pytest.raises(MisconfigurationException, match=f"ModelCheckpoint.*{message}"):
        trainer.fit(Untouched(), batches(0), batches(0))


def test_a_stream_can_stop_where_its_score_is_reached(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    stop = EarlyStopping("stream/ACC", stopping_threshold=0.01, mode="max")
    make_trainer(merge_callback(), stop).fit(module, small_data(STREAM, []))
    assert module.merged_tasks == STREAM[: stop.stopped_epoch + 1] == STREAM[:1]


class Misnamed(Classifier):
    """Logs another name than the one that is asked for."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_accuracy", 0.5, sync_dist=True)


class Percent(Classifier):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_acc", 87.5, sync_dist=True)


@pytest.mark.parametrize(
    ("module", "metric", "message"),
    [
        (Misnamed, "val_acc", r"'val_acc' was not logged for 'a'; did you mean val_accuracy\?"),
        (Misnamed, "val/{task}", r"'val/\{task\}' was not logged for 'a'"),
        (Percent, "val_acc", r"'val_acc/dataloader_idx_0' must be a share in \[0, 1\].*87.5"),
    ],
)
def test_metric_is_checked_at_the_first_validation(
    module: type[Classifier], metric: str, message: str, make_trainer: Make
) -> None:
    """After one epoch, not after the whole first task."""
    seen = Seen()
    trainer = make_trainer(live(epochs_per_task=3, tasks=TASKS, metric=metric), seen, max_epochs=9)
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(module(), Tasks(3))
    assert trainer.current_epoch == 0
    assert seen.rows == []


def test_metric_is_checked_in_a_smoke_run(make_trainer: Make) -> None:
    trainer = make_trainer(live(tasks=TASKS, metric="val_acc"), max_epochs=2, fast_dev_run=True)
    with pytest.raises(MisconfigurationException, match="did you mean val_accuracy"):
        trainer.fit(Misnamed(), Tasks())


def test_a_module_may_log_nothing_in_the_sanity_check_and_only_some_sets_inside_of_a_task(make_trainer: Make) -> None:
    class Sparing(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            boundary = self.trainer.current_epoch % EPOCHS == EPOCHS - 1
            if not self.trainer.sanity_checking and (dataloader_idx == 0 or boundary):
                self.log(f"val/{'abcp'[dataloader_idx]}", 0.5, add_dataloader_idx=False)

    class Sets(Tasks):
        def val_dataloader(self) -> Any:
            return [batches(task) for task in range(4)]

    merge = live(tasks=TASKS, metric="val/{task}", controls=["p"])
    make_trainer(merge, max_epochs=4, num_sanity_val_steps=1).fit(Sparing(), Sets())
    assert merge.live is not None
    assert merge.live.scores.rows == [{"a": 0.5, "p": 0.5}, {"a": 0.5, "b": 0.5, "p": 0.5}]
