"""Rounding is no task: what an incoming model only stores in fewer bits is as it was before."""

import torch
from torch import Tensor

from safemerge_pl.runtime.cores import flat_parts, length_of

__all__ = ["unrounded"]


def unrounded(base: Tensor, new: Tensor) -> tuple[Tensor, bool]:
    """Incoming weights with the pretrained value wherever they are that value, rounded to their dtype.

    Args:
        base: pretrained weights.
        new: incoming weights, of the same shape; in the same or any other floating-point format.

    Returns:
        The weights, in the wider format where any were replaced; and whether rounding the pretrained weights moves
        them farther than what remains of the change does.

    Example:
        >>> base = torch.tensor([1.0001, 2.0, 3.0])
        >>> unrounded(base, torch.tensor([1.0, 2.5, 3.0], dtype=torch.float16))
        (tensor([1.0001, 2.5000, 3.0000]), False)
    """
    wide = torch.promote_types(base.dtype, new.dtype)
    if wide == new.dtype:  # nothing was lost on the way there
        return new, False
    rounded = base.to(new.dtype)
    same = rounded == new
    if same.all():
        return base, False
    if not same.any():
        return new, False
    change, loss = (_distance(rounded, other) for other in (new, base))
    return torch.where(same, base.to(wide), new.to(wide)), loss > change


def _distance(a: Tensor, b: Tensor) -> float:
    return length_of(x.float() - y.float() for x, y in zip(flat_parts(a), flat_parts(b), strict=True))
