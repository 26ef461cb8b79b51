"""Score the weights that a backbone holds: counts are summed over batches and processes, then give a score per set."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from safemerge_pl.backbones.base import Backbone
from safemerge_pl.data.labelled import SetScore
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.runtime.modes import evaluating
from safemerge_pl.scoring.disk_cache import keep_score, read_score, score_file

__all__ = ["Scorer"]


class Scorer:
    """Score of whatever weights a backbone holds on the sets of a data module, inside and outside of a trainer.

    Args:
        backbone: loaded, on the device where scoring runs.
        data: gives the sets by name, and the trainer with its processes if it is attached to one.

    Attributes:
        progress: called by :meth:`score` with the number of batches that are done since the last call.
    """

    def __init__(self, backbone: Backbone, data: StreamDataModule) -> None:
        self.backbone, self.data = backbone, data
        self.progress: Callable[[int], None] | None = None
        self._sets: dict[str, SetScore] = {}
        self._counts: dict[str, Tensor] = {}

    def add(self, name: str) -> SetScore:
        """What scores a set, built once (a head from the pretrained text tower, for example)."""
        if name not in self._sets:
            self._sets[name] = self.data.labelled_set(name).score(self.backbone)
        return self._sets[name]

    def count(self, name: str, batch: Any) -> None:
        """Add a batch to a set's counts."""
        scoring = self.add(name)
        counts = scoring.count(batch)
        self._counts[name] = self._counts[name] + counts if name in self._counts else counts

    def take(self, name: str) -> tuple[float, int]:
        """Score of a set over all processes, and the examples counted; starts the count anew.

        Raises:
            RuntimeError: if nothing was counted.
        """
        scoring, trainer = self.add(name), self.data.trainer
        counts = self._counts.pop(name, scoring.zero())
        if trainer is not None and trainer.world_size > 1:
            strategy = trainer.strategy
            counts = strategy.reduce(counts.to(strategy.root_device), reduce_op="sum").cpu()
        value, counted = scoring.value(counts)
        if not counted:
            raise RuntimeError(f"nothing of '{name}' was scored: its data set is empty.")
        return value, counted

    def reset(self) -> None:
        """Forget what was counted."""
        self._counts.clear()

    @torch.inference_mode()
    def score(self, name: str) -> float:
        """Go through a whole set and score it; the module may be in the middle of a training epoch."""
        device = next(self.backbone.parameters()).device
        trainer = self.data.trainer
        precision = nullcontext() if trainer is None else trainer.precision_plugin.val_step_context()
        alone = trainer is None or (trainer.world_size == 1 and trainer.precision == "32-true")
        file = score_file(self.backbone, self.data.labelled_set(name)) if alone else None
        known = read_score(file)
        if known is not None:
            self._tell(self.data.count_batches(name))
            return known
        with evaluating(self.backbone), precision:
            for batch in self.data.loader(name, self.backbone):
                self.count(name, move_data_to_device(batch, device))
                self._tell(1)
        score = self.take(name)[0]
        keep_score(file, score)
        return score

    def _tell(self, batches: int) -> None:
        if self.progress is not None:
            self.progress(batches)
