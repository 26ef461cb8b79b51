"""Open any checkpoint lazily: one mapping from tensor name to tensor, whatever it was stored in.

Shapes and dtypes come from headers, tensors are read one at a time, and no code from a checkpoint is ever run.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor, nn

from safemerge_pl.architectures.layers import vision_only
from safemerge_pl.checkpoints.adapter import Adapter
from safemerge_pl.checkpoints.adapter_config import ADAPTER_CONFIG, read_adapter_config
from safemerge_pl.checkpoints.hub import download
from safemerge_pl.checkpoints.names import match_names
from safemerge_pl.checkpoints.pickles import load_pickle, tensors_of
from safemerge_pl.checkpoints.refusals import (
    META_FILE,
    WEIGHT_ENDINGS,
    is_whole,
    read_config,
    refuse_folder,
    refuse_impostor,
    refuse_packed,
)
from safemerge_pl.checkpoints.safetensors_files import Safetensors
from safemerge_pl.checkpoints.tensors import Checkpoint, Memory, fingerprint
from safemerge_pl.errors import CheckpointError
from safemerge_pl.runtime.files import local_path

__all__ = ["Checkpoint", "CheckpointError", "Source", "fingerprint", "match_names", "open_checkpoint", "weight_file"]

Source = Mapping[str, Tensor] | nn.Module | str | Path
"""What a model can be given as: tensors by name, a module, or a file, folder or hub id."""

_WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin.index.json",
    "diffusion_pytorch_model.bin",
    "consolidated.safetensors.index.json",
    "consolidated.safetensors",
)
"""Looked for in a folder in this order: safetensors are preferred to pickles."""

_OF_A_FOLDER = re.compile(
    r"(?:model|pytorch_model|adapter_model|open_clip_model|open_clip_pytorch_model|diffusion_pytorch_model|consolidated)"
    r"(?:-\d+-of-\d+)?\.(?:safetensors|bin)"
)
"""Names of weights, whole or in shards, whose folder is given instead of them."""

_NAMED = 5
"""Checkpoints inside a folder that a message names."""

_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def open_checkpoint(source: Source, *, revision: str | None = None) -> Checkpoint:
    """Open a model given as tensors, module, file, folder or hub id.

    Args:
        source: a mapping from name to tensor, an ``nn.Module``, the path of a ``.safetensors`` file, of a ``.bin``,
            ``.pt``, ``.pth`` or ``.ckpt`` file (read with ``weights_only=True``), of a folder that holds weights (one
            file, or sharded with an index) or a PEFT LoRA adapter, or a hub id ``owner/name`` or
            ``owner/name@revision``. An existing path wins over a hub id.
        revision: branch, tag or commit, for a hub id.

    Raises:
        CheckpointError: if nothing usable is there.

    Example:
        >>> import torch
        >>> checkpoint = open_checkpoint({"fc1.weight": torch.zeros(3, 2)})
        >>> list(checkpoint), checkpoint.shape("fc1.weight")
        (['fc1.weight'], (3, 2))
    """
    if isinstance(source, Checkpoint):
        return source
    opened = _open(source, revision)
    if not isinstance(opened, Adapter):
        refuse_packed(vision_only(opened), opened.source, read_config(opened.folder))
    return opened


def _open(source: Source, revision: str | None) -> Checkpoint:
    if isinstance(source, nn.Module):
        name = f"a {type(source).__name__} in memory"
        opened = Memory(tensors_of(source.state_dict(), name), name)
        to_dict = getattr(getattr(source, "config", None), "to_dict", dict)  # transformers' configurations have it
        opened.config = to_dict()
        return opened
    if isinstance(source, Mapping):
        return Memory(tensors_of(source, "a mapping in memory"), "a mapping in memory")
    path = local_path(source)
    if path.name in _ADAPTER_FILES and (path.parent / ADAPTER_CONFIG).exists():
        return _open_adapter(path.parent, str(source))
    if not path.exists():
        path = download(str(source), revision)
    return _open_folder(path, str(source)) if path.is_dir() else _open_file(path, str(source), None)


def weight_file(folder: Path) -> Path | None:
    """The file of a model folder that its weights are read from, or their index; ``None`` if there is none.

    Where none has a name that a library gives, a single safetensors file of any name is read, or Meta's own of a model
    that was not cut into parts.
    """
    found = _weight_files(folder) or sorted(file.name for file in folder.glob("*.safetensors"))
    if found:
        return folder / found[0] if found[0] in _WEIGHT_FILES or len(found) == 1 else None
    meta = folder / META_FILE
    return meta if meta.exists() and is_whole(meta) else None


def _weight_files(folder: Path) -> list[str]:
    return [name for name in _WEIGHT_FILES if (folder / name).exists() or (folder / name).is_symlink()]


def _open_folder(folder: Path, source: str) -> Checkpoint:
    found = _weight_files(folder)
    if (folder / ADAPTER_CONFIG).exists():
        if found:
            raise CheckpointError(
                f"{folder} holds a model ({found[0]}) and an adapter; give a folder with one of them."
            )
        return _open_adapter(folder, source)
    read = weight_file(folder)
    if read is None:
        refuse_folder(folder)
        raise CheckpointError(
            f"{folder} holds no weights: expected one of {', '.join(_WEIGHT_FILES)}{_found_inside(folder)}."
        )
    opened = _open_file(read, source, folder)
    if found[1:]:
        opened.notes += (f"{folder} holds {found[0]}, which is read, and {' and '.join(found[1:])}, which is not",)
    return opened


def _found_inside(folder: Path) -> str:
    """What a user may have meant: files of other names, and folders inside that hold a checkpoint."""
    files = [path.name for ending in WEIGHT_ENDINGS for path in sorted(folder.glob(f"*{ending}"))]
    if files:
        return f"; give one of its files by its path ({_some(files)})"
    for depth in ("*", "*/*", "*/*/*"):
        inside = [path for ending in WEIGHT_ENDINGS for path in sorted(folder.glob(f"{depth}/*{ending}"))]
        found = {path.parent if _OF_A_FOLDER.fullmatch(path.name) else path for path in inside}
        if found:
            return (
                f"; give one of the checkpoints inside ({_some(str(at.relative_to(folder)) for at in sorted(found))})"
            )
    return ""


def _some(names: Iterable[str]) -> str:
    few = list(names)
    return ", ".join(few[:_NAMED]) + (f" and {len(few) - _NAMED} more" if len(few) > _NAMED else "")


def _open_adapter(folder: Path, source: str) -> Adapter:
    config = read_adapter_config(folder / ADAPTER_CONFIG)
    for name in _ADAPTER_FILES:
        if (folder / name).exists() or (folder / name).is_symlink():
            return Adapter(_open_file(folder / name, source, folder), config)
    raise CheckpointError(f"{folder} holds no adapter weights: expected one of {', '.join(_ADAPTER_FILES)}.")


def _open_file(path: Path, source: str, folder: Path | None) -> Checkpoint:
    if path.name.endswith(".index.json"):
        entries = _read_index(path)
        shards = [path.parent / name for name in sorted(set(entries.values()))]
        tensors: dict[str, Tensor] = {}
        if path.name.endswith(".safetensors.index.json"):
            opened: Checkpoint = Safetensors(shards, source, folder)
        else:
            for shard in shards:
                tensors |= load_pickle(shard)
            opened = Memory(tensors, source, folder)
        absent = [name for name in entries if name not in opened]
        if absent:
            raise CheckpointError(f"{path} promises `{absent[0]}`, which is in no shard; fetch the checkpoint again.")
        extra = [name for name in opened if name not in entries]
        if extra:
            opened.notes += (
                f"the shards of {path} hold {len(extra)} tensors that it does not list, first `{extra[0]}`",
            )
        return opened
    refuse_impostor(path)
    if path.suffix == ".safetensors":
        return Safetensors([path], source, folder)
    if path.suffix in WEIGHT_ENDINGS:
        return Memory(load_pickle(path), source, folder)
    raise CheckpointError(f"{path} is not a checkpoint: expected .safetensors, .bin, .pt, .pth or .ckpt.")


def _read_index(index: Path) -> dict[str, str]:
    """Read which tensor is in which shard from an index; every missing shard is named at once."""
    try:
        entries: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = sorted({Path(name).name for name in entries.values() if name})
        outside = [name for name in entries.values() if Path(name).name != name or not name]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a shard index ({error}); fetch it again.") from error
    if outside or not names:
        raise CheckpointError(f"{index} points outside its folder or nowhere: {(outside or [''])[0][:200]!r}.")
    present = set(os.listdir(index.parent))  # asking for a name that is no file name may itself fail
    missing = [name for name in names if name not in present]
    if missing:
        listed = ", ".join(name if len(name) <= 255 and name.isprintable() else repr(name[:60]) for name in missing)
        raise CheckpointError(f"{index}: {len(missing)} of {len(names)} shards are missing: {listed}.")
    return entries
