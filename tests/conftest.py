"""Small real inputs for the tests: the embedded zoo, cut to a few images a set."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see safemerge_pl.cli.main
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["SAFEMERGE_CACHE"] = ""  # keep nothing in the user's cache

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from safemerge_pl.callbacks import SAFEMergeCallback
from safemerge_pl.data import ImageSet, ZooData
from safemerge_pl.module import ContinualMergeModule

collect_ignore = ["killed.py"]  # a program that tests start, no module

TASKS = ["font_category", "weather", "mnist"]
CONTROLS = ["clipart_category"]
RANKS: dict[str, Any] = {"scoring_rank": 21, "recovery_rank": 11, "task_rank": 2, "num_steps": 5}


class SmallZoo(ZooData):
    """The zoo with the first ``rows`` images of every set."""

    rows_kept = 40

    def load_set(self, name: str) -> ImageSet:
        whole = super().load_set(name)
        return ImageSet(name, whole.rows.select(range(self.rows_kept)), whole.classes, whole.templates)


@pytest.fixture
def small_data() -> Callable[..., SmallZoo]:
    def build(tasks: list[str] | None = None, controls: list[str] | None = None, **kwargs: Any) -> SmallZoo:
        return SmallZoo(tasks or TASKS, CONTROLS if controls is None else controls, batch_size=16, **kwargs)

    return build


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    def build(*callbacks: L.Callback, max_epochs: int = len(TASKS), **kwargs: Any) -> L.Trainer:
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "reload_dataloaders_every_n_epochs": 1,
            "log_every_n_steps": 1,
            "default_root_dir": tmp_path,
        }
        return L.Trainer(callbacks=list(callbacks), max_epochs=max_epochs, **{**settings, **kwargs})

    return build


@pytest.fixture
def merge_callback() -> Callable[..., SAFEMergeCallback]:
    def build(**kwargs: Any) -> SAFEMergeCallback:
        return SAFEMergeCallback(**{**RANKS, **kwargs})

    return build


@pytest.fixture
def module() -> ContinualMergeModule:
    return ContinualMergeModule()


def tower(module: L.LightningModule) -> dict[str, torch.Tensor]:
    """Copies of the merged tower's tensors."""
    return {name: tensor.clone() for name, tensor in module.backbone.vision_model.state_dict().items()}  # type: ignore[union-attr]
