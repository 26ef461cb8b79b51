"""Whether a tensor's values can be merged: plain floating-point numbers, loaded, none of them NaN or Inf."""

import torch
from torch import Tensor

from safemerge_pl.checkpoints.tensors import Checkpoint
from safemerge_pl.errors import CheckpointError

__all__ = ["is_finite", "plain_tensor", "require_dtype", "require_finite", "require_values"]


def plain_tensor(tensor: Tensor, name: str, source: str) -> Tensor:
    """Give a tensor whose entries lie in memory one by one, as all arithmetic here needs them.

    Views that are negated or conjugated when they are read are resolved; subclasses that only carry more attributes are
    taken for the tensors that they are.

    Args:
        tensor: as a module or a file holds it.
        name: for the message.
        source: for the message.

    Raises:
        CheckpointError: with the remedy, for any other: sparse, nested, sharded over processes, not yet made.

    Example:
        >>> plain_tensor(torch._neg_view(torch.ones(2)), "weight", "a mapping").is_neg()
        False
    """
    reason = _not_plain(tensor)
    if reason:
        raise CheckpointError(f"{source}: `{name}` {reason}.")
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        tensor = tensor.as_subclass(Tensor)
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _not_plain(tensor: Tensor) -> str:
    """What keeps a tensor from being one of plain entries, with the remedy; empty if nothing does."""
    if torch.nn.parameter.is_lazy(tensor):
        return "was never initialised (a lazy module); run the model once before it is given"
    if tensor.is_nested:
        return "is a nested tensor; give the model with one plain tensor per weight"
    if hasattr(tensor, "full_tensor"):
        return "is sharded over processes (a DTensor); gather it with `full_tensor()`, or save the full state dict"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__name__}, which stands for a tensor without being one; give the plain weights"
    if tensor.layout != torch.strided:
        return f"is stored as {tensor.layout}; give it dense (`to_dense()`)"
    return ""


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
