"""The two rows every merge is read against: the pretrained model and the experts on their own."""

from typing import Any

import lightning as L
import torch

from safemerge_pl.callbacks.merge import MergeCallback
from safemerge_pl.data import StreamDataModule
from safemerge_pl.module import ContinualMergeModule, summarise
from safemerge_pl.scoring import expert_weights, swapped_weights

__all__ = ["ReferenceRows"]


class ReferenceRows(L.Callback):
    """Score the pretrained model and every expert before the first merge.

    *Pre-trained* is the zero-shot model on all tasks and control sets. *Individual* is each expert on its own task, and
    the mean over the experts of their control accuracies (METHODS 12). The rows are saved in checkpoints, so a resumed
    run does not measure them again.

    Args:
        enabled: measure the rows at all.
        individual: measure the experts too; costs one pass over the control sets for each.
    """

    def __init__(self, enabled: bool = True, individual: bool = True) -> None:
        super().__init__()
        self.enabled, self.individual = enabled, individual
        self.rows: dict[str, dict[str, Any]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure what is missing."""
        merge = MergeCallback.of(trainer)
        data = getattr(trainer, "datamodule", None)
        if not self.enabled or merge is None or merge.merger is None:
            return
        if not isinstance(pl_module, ContinualMergeModule) or not isinstance(data, StreamDataModule):
            return
        target = merge.target(pl_module)
        if "pretrained" not in self.rows:
            with swapped_weights(target, dict(merge.merger.pretrained)):
                scores = _score(trainer, pl_module, data, (*data.stream, *data.controls))
            self.rows["pretrained"] = _row(scores, [scores[name] for name in data.stream], data)
            _say(trainer, "pretrained", self.rows["pretrained"])
        if self.individual and "individual" not in self.rows:
            self.rows["individual"] = self._individual(trainer, pl_module, data, merge)
            _say(trainer, "individual", self.rows["individual"])

    def state_dict(self) -> dict[str, Any]:
        """The rows, as plain values."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the rows of an earlier run."""
        self.rows = dict(state_dict["rows"])

    def _individual(
        self, trainer: L.Trainer, module: ContinualMergeModule, data: StreamDataModule, merge: MergeCallback
    ) -> dict[str, Any]:
        target = merge.target(module)
        pretrained = target if merge.merger is None else merge.merger.pretrained
        own: dict[str, float] = {}
        controls: dict[str, list[float]] = {name: [] for name in data.controls}
        for task, source in merge.sources.items():
            with swapped_weights(target, expert_weights(pretrained, source)):
                scores = _score(trainer, module, data, (task, *data.controls))
            own[task] = scores[task]
            for name in data.controls:
                controls[name].append(scores[name])
            _say(trainer, f"expert {task}", {**_row(scores, [own[task]], data), "acc": own[task]})
        means = {name: sum(values) / len(values) for name, values in controls.items()}
        return _row({**own, **means}, list(own.values()), data)


def _row(accuracies: dict[str, float], tasks: list[float], data: StreamDataModule) -> dict[str, Any]:
    return {**summarise(tasks, [accuracies[name] for name in data.controls]), "accuracies": accuracies}


def _score(
    trainer: L.Trainer, module: ContinualMergeModule, data: StreamDataModule, names: tuple[str, ...]
) -> dict[str, float]:
    """Accuracy of the weights in place on some sets, outside any Lightning loop."""
    training = module.training
    module.eval()
    scores = {}
    try:
        with torch.inference_mode():
            for name in names:
                for batch in data.loader(name):
                    pixels, labels = (part.to(module.device, non_blocking=True) for part in batch)
                    module.count(name, (pixels, labels))
                scores[name], _ = module.take_accuracy(name)
    finally:
        module.train(training)
    return scores


def _say(trainer: L.Trainer, what: str, row: dict[str, Any]) -> None:
    """One line a model, where there is a progress bar to print it."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        columns = ("acc", "Gen") if "acc" in row else ("ACC", "Gen", "H")
        parts = [f"{key} {100 * row[key]:.1f}" for key in columns if key in row]
        bar.print(f"  {what:<28} {'  '.join(parts)}")
