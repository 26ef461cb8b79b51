"""Whether a tensor's values can be merged: plain floating-point numbers, loaded, none of them NaN or Inf."""

import torch
from torch import Tensor

from safemerge_pl.checkpoints.tensors import Checkpoint
from safemerge_pl.errors import CheckpointError

__all__ = ["is_finite", "require_dtype", "require_finite", "require_values"]


def require_dtype(checkpoint: Checkpoint, name: str, alias: str | None = None) -> None:
    """Refuse a weight that is not stored in a plain floating-point format.

    Args:
        checkpoint: where it is.
        name: its name there.
        alias: its name in the message, if that is another one.

    Raises:
        CheckpointError: for integers and 8-bit floats.
    """
    dtype = checkpoint.dtype(name)
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(
            f"{checkpoint.source}: `{alias or name}` is {dtype}, a quantised or packed weight; give the model in "
            "float32, bfloat16 or float16."
        )


def require_values(tensor: Tensor, name: str, source: str) -> None:
    """Refuse a tensor that has a shape but no values.

    Raises:
        CheckpointError: for a tensor on the meta device.
    """
    if tensor.is_meta:
        raise CheckpointError(f"{source}: `{name}` was never loaded (it is on the meta device); load the model whole.")


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has neither NaN nor Inf. A finite sum says so in one pass; an infinite one may be an overflow.

    Example:
        >>> [is_finite(torch.tensor(values)) for values in ([1.0, 3e38, 3e38], [1.0, float("nan")])]
        [True, False]
    """
    if tensor.is_floating_point() and torch.isfinite(tensor.sum(dtype=torch.float32)):
        return True
    return bool(torch.isfinite(tensor).all())


def require_finite(tensor: Tensor, name: str, source: str) -> None:
    """Refuse a tensor with NaN or Inf, naming it and how many.

    Raises:
        CheckpointError: if a value is not finite.
    """
    require_values(tensor, name, source)
    if is_finite(tensor):
        return
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    raise CheckpointError(
        f"{source}: `{name}` has {bad} NaN or Inf among {tensor.numel()} values; retrain or repair it."
    )
