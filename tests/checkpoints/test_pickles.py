"""Files of torch: no code is run, and training checkpoints are read as the libraries write them."""

import argparse
import pickle
import random
import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import tiny
import torch
from checkpoint_files import (
    as_old_pt,
    as_pt,
    outcome,
    weights,
)
from tiny import Add, Tensors, notes_but_head
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from safemerge_pl.checkpoints import CheckpointError, match_names, open_checkpoint
from safemerge_pl.merger import ContinualMerger


class Touch:
    """Unpickles by creating a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["model.pt", "model.ckpt", "model.pth", "pytorch_model.bin"])
@pytest.mark.parametrize("how", ["torch", "torch, old format", "plain pickle"])
def test_code_in_a_pickle_does_not_run(name: str, how: str, tmp_path: Path) -> None:
    mark = tmp_path / "the code ran"
    content = {"state_dict": weights(), "callbacks": Touch(mark)}
    path = tmp_path / name
    if how == "plain pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "torch")
    with pytest.raises(CheckpointError, match=r"cannot be read as plain tensors.*safetensors"):
        open_checkpoint(path)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)  # as a folder, where its name is one that is looked for
    assert not mark.exists()
    torch.load(path, weights_only=False) if how != "plain pickle" else pickle.loads(path.read_bytes())
    assert mark.exists()  # the file was dangerous


def test_a_namespace_is_refused_in_a_sentence_that_names_it(tmp_path: Path) -> None:
    torch.save({"state_dict": weights(), "args": argparse.Namespace(lr=1e-3)}, tmp_path / "old.pt")
    with pytest.raises(CheckpointError, match=r"old\.pt.*Namespace.*safetensors\.$") as caught:
        open_checkpoint(tmp_path / "old.pt")
    assert not re.search(r"\n|\x1b|weights_only=False", str(caught.value))


def test_a_whole_module_is_refused_and_its_code_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = types.ModuleType("throwaway_modeling")
    kind = type("ImageEncoder", (nn.Linear,), {"__module__": home.__name__})
    home.ImageEncoder = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    torch.save(kind(2, 2), tmp_path / "encoder.pt")
    monkeypatch.delitem(sys.modules, home.__name__)
    with pytest.raises(CheckpointError, match=r"encoder\.pt.*state dict.*safetensors") as caught:
        open_checkpoint(tmp_path / "encoder.pt")
    assert "No module named" not in str(caught.value)


def test_a_torchscript_archive_is_recognised(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt.*TorchScript"):
        open_checkpoint(tmp_path / "model.pt")


def test_a_file_from_another_device_opens_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage says cuda:0."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save(weights(), tmp_path / "gpu.pt")
    monkeypatch.undo()
    assert open_checkpoint(tmp_path / "gpu.pt")["layer.weight"].device.type == "cpu"


def test_a_checkpoint_that_lightning_wrote_opens(tmp_path: Path) -> None:
    import lightning as L

    class Wrapped(L.LightningModule):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = tiny.hf_vision()

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)
    module = Wrapped(lr=0.1)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "task.ckpt")
    checkpoint = open_checkpoint(tmp_path / "task.ckpt")
    wanted = tiny.only_weights(tiny.tower())
    found = match_names(wanted, checkpoint)
    assert found == {name: f"model.{name}" for name in wanted}
    assert torch.equal(checkpoint[found[wanted[0]]], module.state_dict()[found[wanted[0]]])


@pytest.mark.parametrize("cut", [1, 10, 400])
def test_a_pickle_cut_short_is_refused(cut: int, tmp_path: Path) -> None:
    path = as_pt(weights(), tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        open_checkpoint(path)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [as_pt, as_old_pt], ids=["zip", "old format"])
def test_a_damaged_pickle_is_refused_or_read(make: Callable[[Tensors, Path], Path], tmp_path: Path) -> None:
    path = make(weights(), tmp_path)
    content, rng = path.read_bytes(), random.Random(0)
    wrong, refused = [], 0
    for trial in range(100):
        data = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data[: rng.randrange(len(data))] if trial % 4 == 0 else data))
        try:
            refused += outcome(path) is None
        except Exception as error:
            wrong.append(f"{trial}: {type(error).__name__}: {str(error)[:80]}")
    assert not wrong, f"{len(wrong)} of 100: " + "; ".join(wrong[:5])
    assert refused > 20


@pytest.mark.parametrize("content", [{}, {"lr": 0.1}, {"state_dict": {"a": 1}}])
def test_a_mapping_without_tensors_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="holds no tensors by name"):
        open_checkpoint(content)


def test_a_list_of_tensors_is_refused(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt holds no tensors by name"):
        open_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize("names", [("model", "model_ema"), ("state_dict", "state_dict_ema")])
def test_raw_and_averaged_weights_in_one_file_are_not_chosen_silently(names: tuple[str, str], tmp_path: Path) -> None:
    torch.save({name: tiny.tuned(weights(), seed) for seed, name in enumerate(names)}, tmp_path / "both.pt")
    with pytest.raises(CheckpointError, match=names[1]):
        open_checkpoint(tmp_path / "both.pt")


def expert(build: Callable[[], nn.Module] = tiny.hf_vision) -> nn.Module:
    """A fine-tune of a tiny model."""
    model = build()
    model.load_state_dict(tiny.tuned(model.state_dict(), 1))
    return model


def folded(source: Any, build: Callable[[], nn.Module] = tiny.hf_vision) -> str:
    merger = ContinualMerger(build().state_dict(), Add())
    assert notes_but_head(merger.fold(source, "task")) == ()
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
