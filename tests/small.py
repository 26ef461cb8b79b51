"""The embedded zoo, cut to a few images per set."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import torch

from safemerge_pl.data import ImageSet, ZooData

TASKS = ["font_category", "weather", "mnist"]
CONTROLS = ["clipart_category"]
RANKS: dict[str, Any] = {"scoring_rank": 21, "recovery_rank": 11, "task_rank": 2, "num_steps": 5}


class SmallZoo(ZooData):
    """The zoo with the first ``rows`` images of every set."""

    rows_kept = 40

    def load_set(self, name: str) -> ImageSet:
        whole = super().load_set(name)
        return ImageSet(name, whole.rows.select(range(self.rows_kept)), whole.classes, whole.templates)


class KillingZoo(SmallZoo):
    """Kills the first process that reads its last task, once: with SIGKILL, as the system does when memory runs out."""

    killed: Path

    def load_set(self, name: str) -> ImageSet:
        if name == TASKS[-1]:
            try:
                self.killed.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return super().load_set(name)


def tower(module: L.LightningModule) -> dict[str, torch.Tensor]:
    """Copies of the merged tower's tensors."""
    return {name: tensor.clone() for name, tensor in module.backbone.vision_model.state_dict().items()}  # type: ignore[union-attr]
