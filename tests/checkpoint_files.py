"""One model stored in every way that can be read, and what is made of a damaged file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from tiny import Tensors
from torch import Tensor, nn

from safemerge_pl.checkpoints import Checkpoint, CheckpointError, open_checkpoint


def weights() -> Tensors:
    """Every dtype that a model holds, a scalar, and a matrix that is not contiguous in memory."""
    return {
        "layer.weight": tiny.randn(4, 3),
        "layer.fp16": tiny.randn(2, 2, seed=1).half(),
        "layer.bf16": tiny.randn(3, seed=2).bfloat16(),
        "logit_scale": torch.tensor(2.5),
        "position_ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
    }


def shards(folder: Path, tensors: Tensors, suffix: str, save: Callable[[Tensors, Path], Any]) -> Path:
    """Two shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    names = list(tensors)
    where = {name: f"{stem}-0000{1 + i % 2}-of-00002.{suffix}" for i, name in enumerate(names)}
    for file in set(where.values()):
        save({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def as_module(tensors: Tensors, tmp_path: Path) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        owner = module
        for part in name.split(".")[:-1]:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_buffer(name.split(".")[-1], tensor)
    return module


def as_mapping(tensors: Tensors, tmp_path: Path) -> Tensors:
    return tensors


def as_nested_mapping(tensors: Tensors, tmp_path: Path) -> dict[str, Any]:
    return {"state_dict": tensors, "epoch": 3}


def as_safetensors(tensors: Tensors, tmp_path: Path) -> Path:
    save_file(tensors, tmp_path / "any name.safetensors", metadata={"format": "pt"})
    return tmp_path / "any name.safetensors"


def as_folder(tensors: Tensors, tmp_path: Path) -> Path:
    return tiny.folder_of(tmp_path / "model", tensors, config={})


def as_folder_text(tensors: Tensors, tmp_path: Path) -> str:
    return str(as_folder(tensors, tmp_path))


def as_open_clip_folder(tensors: Tensors, tmp_path: Path) -> Path:
    save_file(tensors, tmp_path / "open_clip_model.safetensors")
    return tmp_path


def as_lone_file_in_folder(tensors: Tensors, tmp_path: Path) -> Path:
    save_file(tensors, tmp_path / "finetuned.safetensors")
    return tmp_path


def as_shards(tensors: Tensors, tmp_path: Path) -> Path:
    return shards(tmp_path / "sharded", tensors, "safetensors", save_file)


def as_bin(tensors: Tensors, tmp_path: Path) -> Path:
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    return tmp_path


def as_open_clip_bin(tensors: Tensors, tmp_path: Path) -> Path:
    torch.save(tensors, tmp_path / "open_clip_pytorch_model.bin")
    return tmp_path


def as_bin_shards(tensors: Tensors, tmp_path: Path) -> Path:
    return shards(tmp_path / "sharded", tensors, "bin", torch.save)


def as_pt(tensors: Tensors, tmp_path: Path) -> Path:
    torch.save(tensors, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def as_old_pt(tensors: Tensors, tmp_path: Path) -> Path:
    torch.save(tensors, tmp_path / "model.pth", _use_new_zipfile_serialization=False)
    return tmp_path / "model.pth"


def as_ckpt(tensors: Tensors, tmp_path: Path) -> Path:
    """As Lightning writes it, with an optimiser whose tensors must not be taken for weights."""
    content = {
        "epoch": 3,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": tensors,
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(4, 3)}}}],
        "hyper_parameters": {"lr": 1e-3},
    }
    torch.save(content, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def as_training_dict(tensors: Tensors, tmp_path: Path) -> Path:
    torch.save({"model": tensors, "optimizer": {"state": {}}, "step": torch.tensor(5)}, tmp_path / "step.pt")
    return tmp_path / "step.pt"


def in_folder(tmp_path: Path, name: str, content: bytes) -> Path:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / name).write_bytes(content)
    return folder


def outcome(path: Path) -> Tensors | None:
    """What our reader makes of a file: all tensors, or ``None`` if it refuses; any other exception is a bug."""
    try:
        checkpoint: Checkpoint = open_checkpoint(path)
        tensors = {name: checkpoint[name] for name in checkpoint}
        described = {name: (checkpoint.shape(name), checkpoint.dtype(name)) for name in checkpoint}
    except CheckpointError as error:
        if str(path) not in str(error):
            raise LookupError(f"the file is not named: {error}") from error
        return None
    assert described == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return tensors


def bits(tensors: Tensors) -> dict[str, tuple[Any, ...]]:
    def raw(tensor: Tensor) -> bytes:
        return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())

    return {name: (tensor.dtype, tuple(tensor.shape), raw(tensor)) for name, tensor in tensors.items()}
