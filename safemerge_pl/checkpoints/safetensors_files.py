"""Tensors out of safetensors files: shapes and dtypes from the headers, values when they are asked for."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from safemerge_pl.checkpoints.refusals import refuse_impostor
from safemerge_pl.checkpoints.tensors import Checkpoint
from safemerge_pl.errors import CheckpointError

__all__ = ["DTYPES", "Safetensors"]

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their code in a safetensors file."""


class Safetensors(Checkpoint):
    """One or more safetensors files; each header is read once, each tensor when asked for."""

    def __init__(self, files: Sequence[Path], source: str, folder: Path | None = None) -> None:
        self.source, self.folder = source, folder
        self._entries: dict[str, tuple[Path, tuple[int, ...], str]] = {}
        for file in files:
            for name, (shape, code) in _read_header(file).items():
                if name in self._entries:
                    raise CheckpointError(f"{file}: tensor `{name}` also stands in {self._entries[name][0].name}.")
                self._entries[name] = (file, shape, code)

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        self.dtype(name)
        with safe_open(self._entries[name][0], framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Checkpoint`."""
        return self._entries[name][1]

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Checkpoint`."""
        file, _, code = self._entries[name]
        if code not in DTYPES:
            raise CheckpointError(
                f"{file}: tensor `{name}` is stored as {code}, a quantised or packed weight; give the model in "
                "float32, bfloat16 or float16."
            )
        return DTYPES[code]


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype code of every tensor of a safetensors file; the library checks the header against the size."""
    from safetensors import SafetensorError, safe_open

    refuse_impostor(path)
    try:
        with safe_open(path, framework="pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  # no mapping
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is truncated or no safetensors file ({error}); fetch it again."
        ) from error
