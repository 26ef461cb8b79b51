"""Write safetensors files tensor by tensor, in shards where a model is large."""

import json
import math
import os
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from safemerge_pl.checkpoints.open import CheckpointError
from safemerge_pl.checkpoints.safetensors_files import DTYPES
from safemerge_pl.folding.processes import Processes

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
    *,
    processes: Processes | None = None,
    owners: Mapping[str, int] | None = None,
) -> None:
    """Write ``stem.safetensors``, or numbered shards and the index that transformers reads.

    Each tensor is asked for when its turn comes and let go of at once, so one tensor is held at a time. Where several
    processes write together, the first makes each file in its full length, and everybody puts tensors into their
    places: which files there are, and their bytes, do not depend on the number of processes.

    Args:
        folder: where to.
        stem: file name without ending.
        specs: name -> shape and dtype of every tensor, in the order in which they are dealt out to the shards.
        read: gives a tensor by name; it is written in the dtype of its spec.
        max_shard_size: size that no shard exceeds, unless a single tensor does.
        processes: that write together; all of them make this call.
        owners: rank of the process that writes each tensor.

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
    processes = Processes(shared=False) if processes is None else processes
    files = {folder / file: {name: specs[name] for name in names} for file, names in split.filename_to_tensors.items()}

    def make_files() -> None:
        for path, tensors in files.items():
            with path.open("wb") as file:
                header = _header(tensors)
                file.write(header)
                file.truncate(len(header) + sum(spec.size for spec in tensors.values()))
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
            (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def fill_files() -> None:
        for path, tensors in files.items():
            own = {name for name in tensors if owners is None or owners[name] == processes.rank}
            _fill_file(path, tensors, own, read, processes)

    processes.lead(make_files)
    processes.agree(fill_files)


def _fill_file(
    path: Path, specs: Mapping[str, TensorSpec], own: Set[str], read: Callable[[str], Tensor], processes: Processes
) -> None:
    """Put tensors into their places in a file that has its header and length."""
    # for writing only: a client of NFS that may also read writes whole pages, and with them bytes of its neighbours
    handle = os.open(path, os.O_WRONLY | getattr(os, "O_BINARY", 0))
    try:
        place = len(_header(specs))
        for name in _order(specs):
            spec = specs[name]
            if name in own:
                processes.check()
                tensor = read(name)
                if tuple(tensor.shape) != spec.shape:
                    raise CheckpointError(f"`{name}` has shape {tuple(tensor.shape)}, expected {spec.shape}.")
                flat = tensor.detach().to(device="cpu", dtype=spec.dtype).contiguous().reshape(-1)
                os.lseek(handle, place, os.SEEK_SET)
                _write_all(handle, flat.view(torch.uint8).numpy().data)
            place += spec.size
        if processes.count > 1:  # a disk that is full says so here at the latest; else all is synchronised at the end
            os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, data: memoryview) -> None:
    """Write all of it, which the system may do in parts."""
    while data:
        data = data[os.write(handle, data) :]


def _order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Names in the order of a file: wide dtypes stand first, so that every tensor is aligned."""
    return sorted(specs, key=lambda name: -specs[name].dtype.itemsize)


def _header(specs: Mapping[str, TensorSpec]) -> bytes:
    """Length of the header, and the header."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in _order(specs):
        start, end = end, end + specs[name].size
        entries[name] = {
            "dtype": _CODES[specs[name].dtype],
            "shape": list(specs[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
