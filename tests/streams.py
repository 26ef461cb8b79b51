"""What several tests of a stream of checkpoints share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from small import RANKS, tower

from safemerge_pl.callbacks import StreamProgress
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import SafeMerge
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.scoring import Scorer
from safemerge_pl.zoo import FILES

Make = Callable[..., Any]


class CountingProgress(StreamProgress):
    """Notes for each bar what it says, its whole length, and how far it came."""

    def __init__(self) -> None:
        super().__init__()
        self.bars: list[tuple[str, int, int]] = []

    @contextmanager
    def scoring(self, scorer: Scorer, sets: Sequence[str], what: str) -> Iterator[None]:
        done: list[int] = []
        with super().scoring(scorer, sets, what):
            scorer.progress = done.append
            yield
        self.bars.append((what, sum(map(scorer.data.count_batches, sets)), sum(done)))


def direct(tasks: list[str], **settings: Any) -> ContinualMerger:
    """The same merge without Lightning."""
    merger = ContinualMerger(FILES / "model", SafeMerge(**{**RANKS, **settings}))
    for task in tasks:
        merger.fold(FILES / "experts" / task, task)
    return merger


def assert_same_weights(module: L.LightningModule, merger: ContinualMerger) -> None:
    mine = tower(module)
    for name, tensor in merger.merged_parameters().items():
        assert torch.equal(mine[name.removeprefix("vision_model.")], tensor), name


def checkpoint_after_two(module: ContinualMergeModule, data: Any, trainer: L.Trainer, path: Path) -> Path:
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    return path
