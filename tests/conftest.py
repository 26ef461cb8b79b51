"""Fixtures: small real inputs, a quiet trainer."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see safemerge_pl.cli.main
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["SAFEMERGE_CACHE"] = ""  # keep nothing in the user's cache

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from small import CONTROLS, RANKS, TASKS, SmallZoo

from safemerge_pl.callbacks import SAFEMergeCallback
from safemerge_pl.module import ContinualMergeModule

collect_ignore = ["killed.py", "together.py", "warm.py"]  # programs that tests start, no modules


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


@pytest.fixture(scope="session")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny CLIP with two experts beside it, and of image sets; see ``tiny_hub.write_benchmark``."""
    from tiny_hub import write_benchmark

    return write_benchmark(tmp_path_factory.mktemp("benchmark"))


@pytest.fixture
def datasets_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's is read or written by ``datasets``, and no bar is drawn."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    datasets.disable_progress_bars()
