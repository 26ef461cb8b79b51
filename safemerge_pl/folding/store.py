"""Tensors that wait on disk: a mapping for models whose merged weights do not fit in memory."""

import itertools
import shutil
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["DiskTensors"]


class DiskTensors(MutableMapping[str, Tensor]):
    """Float32 tensors by name, one file per tensor; what is read is a copy, so a change has to be put back.

    Args:
        folder: made for this mapping, and gone with :meth:`close`.

    Example:
        >>> import tempfile
        >>> store = DiskTensors(Path(tempfile.mkdtemp()) / "merged")
        >>> store["a"] = torch.ones(2, 1)
        >>> store["a"].tolist(), store.folder.exists(), store.close(), store.folder.exists()
        ([[1.0], [1.0]], True, None, False)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        self._numbers = itertools.count()  # of files; one that was deleted does not come again
        folder.mkdir(parents=True)

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(np.fromfile(self._files[name], np.float32)).view(self._shapes[name])

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        if name not in self._files:
            self._files[name] = self.folder / str(next(self._numbers))
        self._shapes[name] = tuple(tensor.shape)
        tensor.detach().float().contiguous().numpy().tofile(self._files[name])

    def __delitem__(self, name: str) -> None:
        self._files.pop(name).unlink()
        del self._shapes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._files  # a mapping's own way would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._files.clear()
