"""Write safetensors files tensor by tensor, in shards where a model is large."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from safemerge_pl.checkpoints.open import CheckpointError
from safemerge_pl.checkpoints.safetensors_files import DTYPES

__all__ = ["TensorSpec", "parse_size", "write_weights"]

_CODES = {dtype: code for code, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * self.dtype.itemsize


def parse_size(size: int | str) -> int:
    """Bytes of a size such as ``"5GB"``.

    Raises:
        CheckpointError: if it is none.

    Example:
        >>> parse_size("5GB"), parse_size(1000)
        (5000000000, 1000)
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    text = str(size).strip().upper()
    number = text[:-2] if text[-2:] in units else text
    try:
        found = int(float(number) * units.get(text[-2:], 1))
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise CheckpointError(f"`max_shard_size` must be a number of bytes or a size such as '5GB', got {size!r}.")
    return found


def write_weights(
    folder: Path,
    stem: str,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], Tensor],
    max_shard_size: int | str = "5GB",
) -> None:
    """Write ``stem.safetensors``, or numbered shards and the index that transformers reads.

    Each tensor is asked for when its turn comes and let go of at once, so one tensor is held at a time.

    Args:
        folder: where to.
        stem: file name without ending.
        specs: name -> shape and dtype of every tensor, in the order in which they are dealt out to the shards.
        read: gives a tensor by name; it is written in the dtype of its spec.
        max_shard_size: size that no shard exceeds, unless a single tensor does.

    Raises:
        CheckpointError: for a dtype that the format does not have.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    unknown = next((name for name, spec in specs.items() if spec.dtype not in _CODES), None)
    if unknown is not None:
        raise CheckpointError(f"`{unknown}` is {specs[unknown].dtype}, which cannot be written; convert it first.")
    split = split_state_dict_into_shards_factory(
        dict(specs),
        get_storage_size=lambda spec: spec.size,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=parse_size(max_shard_size),
    )
    for file, names in split.filename_to_tensors.items():
        _write_file(folder / file, {name: specs[name] for name in names}, read)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_file(path: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor]) -> None:
    """One file: length of the header, header, data. Wide dtypes stand first, so that every tensor is aligned."""
    order = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    with path.open("wb") as file:
        file.write(_header((name, specs[name]) for name in order))
        for name in order:
            spec, tensor = specs[name], read(name)
            if tuple(tensor.shape) != spec.shape:
                raise CheckpointError(f"`{name}` has shape {tuple(tensor.shape)}, expected {spec.shape}.")
            flat = tensor.detach().to(device="cpu", dtype=spec.dtype).contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


def _header(specs: Iterable[tuple[str, TensorSpec]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in specs:
        start, end = end, end + spec.size
        entries[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
