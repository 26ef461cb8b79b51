"""Keep results that take long on disk for later runs: one file per result, named by a hash of its inputs.

A damaged or unreadable file counts as missing, and a cache that cannot be written is ignored.
"""

import hashlib
import json
import os
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path

import platformdirs
import torch
from torch import Tensor

from safemerge_pl.runtime.files import local_path, write_bytes

__all__ = ["CachedTensors", "cache_file", "cache_folder", "load_tensor", "save_tensor"]

_NAME = "safemerge_pl"


def cache_folder() -> Path | None:
    """Find the folder of kept results.

    Returns:
        ``SAFEMERGE_CACHE`` if it is set (``None`` if it is set empty), else ``safemerge_pl`` in ``XDG_CACHE_HOME`` or
        in the place that the system has for a user's caches.
    """
    place = os.environ.get("SAFEMERGE_CACHE")
    if place is not None:
        return local_path(place) if place else None
    home = os.environ.get("XDG_CACHE_HOME")  # read on every system, and also where it is not absolute
    return local_path(home) / _NAME if home else platformdirs.user_cache_path(_NAME, appauthor=False)


def cache_file(kind: str, inputs: object, ending: str = "safetensors") -> Path | None:
    """Name the file of a result.

    Args:
        kind: sub-folder, one per kind of result.
        inputs: everything that the result depends on, as plain values.
        ending: of the file's name.

    Returns:
        The file, which need not exist; ``None`` where nothing is to be kept.

    Example:
        >>> cache_file("heads", ["a cat", "a dog"]) == cache_file("heads", ["a cat", "a dog"])
        True
    """
    folder, content = cache_folder(), json.dumps(inputs)
    return folder and folder / kind / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.{ending}"


def load_tensor(file: Path | None) -> Tensor | None:
    """Read a tensor; ``None`` if there is no file, or none that can be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if file is None:
        return None
    try:
        return load_file(file)["tensor"]
    except (OSError, SafetensorError, KeyError):
        return None


def save_tensor(file: Path | None, tensor: Tensor) -> None:
    """Write a tensor, unless ``file`` is ``None`` or cannot be written."""
    from safetensors.torch import save

    if file is not None:
        with suppress(OSError):
            write_bytes(file, save({"tensor": tensor.contiguous().cpu()}))


class CachedTensors(MutableMapping[str, Tensor]):
    """Tensors by name, in memory and in files; one that is only in a file is read when it is first used.

    Args:
        inputs: what all of them depend on, as plain values; ``None`` to leave files alone.
        device: where the tensors belong.

    Example:
        >>> tensors = CachedTensors(None, torch.device("cpu"))
        >>> tensors["basis"] = torch.ones(2)
        >>> "basis" in tensors, "another" in tensors
        (True, False)
    """

    def __init__(self, inputs: object, device: torch.device) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._inputs, self._device = inputs, device

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            kept = load_tensor(self._file(name))
            if kept is None:
                raise KeyError(name)
            self._tensors[name] = kept.to(self._device)
        return self._tensors[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor
        save_tensor(self._file(name), tensor)

    def __delitem__(self, name: str) -> None:
        del self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the tensors in memory."""
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _file(self, name: str) -> Path | None:
        return None if self._inputs is None else cache_file("bases", [self._inputs, name])
