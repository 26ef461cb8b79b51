"""Tensors by name, read when they are asked for: the one shape that every model has here."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from safemerge_pl.errors import CheckpointError
from safemerge_pl.runtime.cores import map_on_cores

__all__ = [
    "HASHED_AT_ONCE",
    "Checkpoint",
    "LazyTensors",
    "Memory",
    "View",
    "fingerprint",
    "hash_each",
    "hash_lines",
    "is_floating",
    "tied_names",
]

HASHED_AT_ONCE = 8
"""Tensors in memory at a time on their way into a fingerprint, however many cores there are."""


class Checkpoint(Mapping[str, Tensor]):
    """Tensors by name, read when they are asked for.

    Attributes:
        source: where it came from, for messages and reports.
        folder: the folder it was found in, ``None`` for anything else.
        config: settings of a module in memory; those of a folder lie in it.
        notes: what the user should know about how it was read, one sentence each.
    """

    source: str
    folder: Path | None = None
    config: Mapping[str, Any] = MappingProxyType({})
    notes: tuple[str, ...] = ()

    def __contains__(self, name: object) -> bool:
        try:
            self.shape(str(name))
        except KeyError:
            return False
        return True  # a mapping's own way would read the tensor

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without reading it."""

    def storage(self, name: str) -> int | None:
        """Address of a tensor, the same for tied ones; ``None`` where none can be tied."""
        return None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: self.shape(name) for name in self}


class View(Checkpoint):
    """A model that differs from another in what it overrides.

    Args:
        under: the other model.
    """

    def __init__(self, under: Checkpoint) -> None:
        self.source, self.folder, self.notes = under.source, under.folder, under.notes
        self.config = under.config
        self._under = under

    def __getitem__(self, name: str) -> Tensor:
        return self._under[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._under)

    def __len__(self) -> int:
        return len(self._under)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Checkpoint`."""
        return self._under.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Checkpoint`."""
        return self._under.dtype(name)


class Memory(Checkpoint):
    """Tensors that are in memory (or memory-mapped) already."""

    def __init__(self, tensors: Mapping[str, Tensor], source: str, folder: Path | None = None) -> None:
        self._tensors, self.source, self.folder = dict(tensors), source, folder

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Checkpoint`."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Checkpoint`."""
        return self._tensors[name].dtype

    def storage(self, name: str) -> int | None:
        """See :class:`Checkpoint`."""
        tensor = self._tensors[name]
        return None if tensor.is_meta or not tensor.numel() else tensor.data_ptr()


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that a function gives by name, each time that they are asked for.

    Args:
        names: of the tensors.
        read: gives a tensor by name.

    Example:
        >>> LazyTensors(["a"], lambda name: torch.ones(2))["a"].tolist()
        [1.0, 1.0]
    """

    def __init__(self, names: Sequence[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # a mapping's own way would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def is_floating(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is stored in a plain floating-point format; ``False``, not an error, for any other.

    Example:
        >>> model = Memory({"weight": torch.ones(1), "position_ids": torch.arange(3)}, "a mapping")
        >>> is_floating(model, "weight"), is_floating(model, "position_ids")
        (True, False)
    """
    try:
        return checkpoint.dtype(name).is_floating_point
    except CheckpointError:  # an 8-bit format
        return False


def tied_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Find the names of tensors in memory that are one and the same.

    Returns:
        Each further name of a tensor -> its first name.

    Example:
        >>> weight = torch.ones(2, 1)
        >>> tied_names(Memory({"embed": weight, "head": weight, "other": torch.ones(2, 1)}, "a mapping"))
        {'head': 'embed'}
    """
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    for name in checkpoint:
        place = checkpoint.storage(name)
        if place is not None:
            known = first.setdefault((place, checkpoint.shape(name)), name)
            if known != name:
                aliases[name] = known
    return aliases


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, dtypes, shapes and the SHA-256 of each tensor's bytes to 64 hexadecimal digits, by SHA-256.

    Tensors are read and hashed side by side, one per core; the hash depends on the mapping's order.

    Example:
        >>> fingerprint({"a": torch.zeros(2)}) == fingerprint({"a": torch.zeros(2)})
        True
    """
    return hash_lines(hash_each(tensors))


def hash_each(tensors: Mapping[str, Tensor], before_each: Callable[[], None] = lambda: None) -> list[str]:
    """A line per tensor, in order: its name, dtype, shape and the SHA-256 of its bytes.

    Args:
        tensors: by name.
        before_each: called before a tensor is read.
    """

    def describe(name: str) -> str:
        before_each()
        flat = tensors[name].detach().cpu().contiguous()
        content = hashlib.sha256(flat.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        return f"{name} {flat.dtype} {tuple(flat.shape)} {content}\n"

    return list(map_on_cores(describe, list(tensors), most=HASHED_AT_ONCE))


def hash_lines(lines: Sequence[str]) -> str:
    """The fingerprint of tensors, from what :func:`hash_each` found."""
    return hashlib.sha256("".join(lines).encode()).hexdigest()
