"""Accuracies at the boundaries of a training loop: where they come from, and the matrix that they make."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from loops import EPOCHS, TASKS, Classifier, Tasks, Watch, accuracies, batches, encoder, live

Make = Callable[..., Any]


pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


class Named(Classifier):
    """Logs one name per task."""

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
    """From logged metrics with one loader per task, with one name per task, or from a function."""
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
