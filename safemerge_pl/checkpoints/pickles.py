"""Read tensors from torch files with the weights-only loader, so that no code from a file is ever run."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from safemerge_pl.checkpoints.refusals import refuse_impostor
from safemerge_pl.checkpoints.values import plain_tensor
from safemerge_pl.errors import CheckpointError

__all__ = ["load_pickle", "read_pickle", "tensors_of"]


def load_pickle(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a torch file with the weights-only loader.

    Raises:
        CheckpointError: if it holds anything else, or is damaged.
    """
    return tensors_of(read_pickle(path), str(path))


def read_pickle(path: Path) -> Any:
    """Read tensors and plain values of a torch file with the weights-only loader.

    Raises:
        CheckpointError: if it holds anything else, or is damaged.
    """
    refuse_impostor(path)
    entries = _zip_entries(path)
    if any("/code/" in name for name in entries):
        raise CheckpointError(f"{path} is a TorchScript archive, a program; save the module's state dict instead.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=bool(entries))
    except Exception as error:  # every refusal of the loader is the same to the user: it is not plain tensors
        kind = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it holds a {kind[1]}" if kind else f"damaged, or not written by torch.save: {type(error).__name__}"
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({reason}); load it where you trust it and save its state dict "
            "as safetensors."
        ) from error


def _zip_entries(path: Path) -> list[str]:
    """List the names inside a zip archive; none for any other file, or a damaged one, which the loader refuses."""
    try:
        return zipfile.ZipFile(path).namelist()
    except (ValueError, NotImplementedError, OSError, zipfile.BadZipFile):
        return []


def tensors_of(content: Any, source: str) -> dict[str, Tensor]:
    """Find the tensors of a state dict, or of the one model inside a training checkpoint.

    Raises:
        CheckpointError: if there is none, or more than one (raw and averaged weights, student and teacher).
    """
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{source} holds no tensors by name: expected a state dict.")
    models = [str(key) for key, value in content.items() if isinstance(value, Mapping) and _is_model(str(key))]
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not models and not tensors:
        models = [
            str(key)
            for key, value in content.items()
            if isinstance(value, Mapping) and any(isinstance(item, Tensor) for item in value.values())
        ]
    if len(models) > 1:
        raise CheckpointError(
            f"{source} holds several models ({', '.join(models)}); save the one to merge as a state dict of its own."
        )
    if models:
        return tensors_of(content[models[0]], source)
    if not tensors:
        raise CheckpointError(f"{source} holds no tensors by name: expected a state dict.")
    return {name: plain_tensor(tensor, name, source) for name, tensor in tensors.items()}


def _is_model(key: str) -> bool:
    """Whether training scripts keep a model's weights under this key."""
    return re.fullmatch(r"(?:model|state_dict|ema)(?:_ema|_state_dict)*|model_state", key) is not None
