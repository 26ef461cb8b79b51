"""What several tests of a stream of checkpoints share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from small import RANKS, tower

from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import SafeMerge
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.zoo import FILES

Make = Callable[..., Any]


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
