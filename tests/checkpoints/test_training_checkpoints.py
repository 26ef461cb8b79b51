"""Checkpoints as training loops leave them: wrappers, averages, containers; written by the libraries themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import tiny
import torch
from tiny import Add, Tensors
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.merger import ContinualMerger


def expert(build: Callable[[], nn.Module] = tiny.hf_vision) -> nn.Module:
    """A fine-tune of a tiny model."""
    model = build()
    model.load_state_dict(tiny.tuned(model.state_dict(), 1))
    return model


def folded(source: Any, build: Callable[[], nn.Module] = tiny.hf_vision) -> str:
    merger = ContinualMerger(build().state_dict(), Add())
    assert merger.fold(source, "task").notes == ()
    return merger.fingerprint()


def assert_like_plain(source: Any, build: Callable[[], nn.Module] = tiny.hf_vision) -> None:
    assert folded(source, build) == folded(expert(build), build)


def saved(content: Any, tmp_path: Path, **settings: Any) -> Path:
    torch.save(content, tmp_path / "model.pt", **settings)
    return tmp_path / "model.pt"


class Holder(nn.Module):
    """A user's module around the model."""

    def __init__(self, model: nn.Module, name: str = "backbone") -> None:
        super().__init__()
        self.add_module(name, model)
        self.head = nn.Linear(8, 3)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "compile": torch.compile,  # type: ignore[dict-item]
    "compiled DataParallel": lambda model: torch.compile(nn.DataParallel(model)),  # type: ignore[dict-item]
    "SWA": AveragedModel,
    "SWA of a compiled model": lambda model: AveragedModel(torch.compile(model)),  # type: ignore[arg-type]
    "a holder": Holder,
    "a holder of a compiled model": lambda model: Holder(torch.compile(model)),  # type: ignore[arg-type]
    "model in encoder": lambda model: Holder(Holder(model, "model"), "encoder"),
}


@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize("build", [tiny.hf_vision, tiny.open_clip_model, tiny.timm_vit])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_do_not_matter(wrapper: str, build: Callable[[], nn.Module], old_format: bool, tmp_path: Path) -> None:
    """In the zip format of torch and in the one before it."""
    state = WRAPPERS[wrapper](expert(build)).state_dict()
    assert_like_plain(saved(state, tmp_path, _use_new_zipfile_serialization=not old_format), build)


def test_a_training_checkpoint_of_open_clip_is_read(tmp_path: Path) -> None:
    """As its trainer saves it under DDP."""
    model = nn.DataParallel(expert(tiny.open_clip_model))
    optimizer = torch.optim.AdamW(model.parameters())
    model(tiny.randn(2, 3, 8, 8), torch.zeros(2, 8, dtype=torch.int64))[0].sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.module.load_state_dict(expert(tiny.open_clip_model).state_dict())
    content = {
        "epoch": 3,
        "name": "ViT-tiny",
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": {"scale": 65536.0, "_growth_tracker": 0},
    }
    assert_like_plain(saved(content, tmp_path), tiny.open_clip_model)


def test_a_training_checkpoint_of_timm_is_read(tmp_path: Path) -> None:
    """Its saver's keys; with the average beside the raw weights there are two models, and none is guessed."""
    from timm.utils import ModelEmaV3

    model = expert(tiny.timm_vit)
    content = {"epoch": 1, "arch": "vit", "state_dict": model.state_dict(), "version": 2, "metric": 0.5}
    assert_like_plain(saved(content, tmp_path), tiny.timm_vit)
    content["state_dict_ema"] = ModelEmaV3(model).state_dict()
    with pytest.raises(CheckpointError, match=r"several models \(state_dict, state_dict_ema\)"):
        open_checkpoint(saved(content, tmp_path))


CONTAINERS = ["model", "state_dict", "model_state_dict", "net", "network", "params", "weights", "module", "teacher"]


@pytest.mark.parametrize("key", CONTAINERS)
def test_the_one_model_of_a_container_is_found_under_any_key(key: str, tmp_path: Path) -> None:
    """Beside an optimiser, whose tensors lie deeper."""
    model = expert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert_like_plain(saved({key: expert().state_dict(), "optimizer": optimizer.state_dict(), "step": 5}, tmp_path))


@pytest.mark.parametrize("keys", [("student", "teacher"), ("net", "net_ema"), ("params", "params_ema")])
def test_two_models_in_a_container_are_not_chosen_between(keys: tuple[str, str], tmp_path: Path) -> None:
    content = {key: expert().state_dict() for key in keys}
    with pytest.raises(CheckpointError, match=rf"several models \({keys[0]}, {keys[1]}\)"):
        open_checkpoint(saved(content, tmp_path))


class Tuning(L.LightningModule):
    """A user's fine-tuning loop with a teacher or without."""

    def __init__(self, teacher: bool = False, name: str = "model") -> None:
        super().__init__()
        self.save_hyperparameters()
        setattr(self, name, expert())
        if teacher:
            self.teacher = expert()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        model = next(self.children())
        return 0 * model(batch).pooler_output.sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.0, weight_decay=0.0)


def trained(module: L.LightningModule, tmp_path: Path, *callbacks: L.Callback) -> Path:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        default_root_dir=tmp_path,
        callbacks=list(callbacks),
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(module, DataLoader([tiny.randn(3, 8, 8)]))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


@pytest.mark.parametrize("name", ["model", "backbone", "encoder", "net"])
def test_a_lightning_checkpoint_is_read_whatever_the_attribute_is_called(name: str, tmp_path: Path) -> None:
    """After a real fit, with optimiser and loop state."""
    assert_like_plain(trained(Tuning(name=name), tmp_path))


def test_a_lightning_checkpoint_with_averaged_weights_gives_these(tmp_path: Path) -> None:
    """Its callback puts the average under ``state_dict`` and the raw weights beside it."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    path = trained(Tuning(), tmp_path, EMAWeightAveraging())
    assert {"state_dict", "current_model_state"} <= torch.load(path, weights_only=True).keys()
    assert_like_plain(path)


def test_a_lightning_module_with_a_teacher_holds_the_model_twice(tmp_path: Path) -> None:
    """The user must say which; giving the tensors of one is the remedy."""
    path = trained(Tuning(teacher=True), tmp_path)
    with pytest.raises(CheckpointError, match=r"holds the model twice, as `model\..*and as `teacher\."):
        folded(path)
    tensors: Tensors = torch.load(path, weights_only=True)["state_dict"]
    assert_like_plain({name: tensor for name, tensor in tensors.items() if name.startswith("model.")})
