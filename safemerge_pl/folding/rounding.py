"""Rounding is no task: what an incoming model only stores in fewer bits is as it was before."""

import torch
from torch import Tensor

from safemerge_pl.runtime.cores import flat_parts, length_of

__all__ = ["unrounded"]

_LOOKED_AT = 256
"""Entries that tell most tensors apart from those that were converted back from half precision, before all are read."""


def unrounded(base: Tensor, new: Tensor) -> tuple[Tensor, bool]:
    """Incoming weights with the pretrained value wherever they are that value, rounded to the format they came from.

    That is their dtype, or a narrower one that they were converted back from: every entry is exact in it then.

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
    narrow = new.dtype if wide != new.dtype else _narrower(new)
    if narrow is None:  # nothing was lost on the way there
        return new, False
    rounded = base.to(narrow).to(new.dtype)
    same = rounded == new
    if same.all():
        return base, False
    if not same.any():
        return new, False
    change, loss = (_distance(rounded, other) for other in (new, base))
    return torch.where(same, base.to(wide), new.to(wide)), loss > change


def _narrower(tensor: Tensor) -> torch.dtype | None:
    """A format of half precision that holds every entry of a wider tensor; ``None`` if there is none."""
    if tensor.dtype not in (torch.float32, torch.float64):
        return None
    start = tensor.flatten()[:_LOOKED_AT] if tensor.is_contiguous() else tensor[:1].flatten()[:_LOOKED_AT]
    for dtype in (torch.bfloat16, torch.float16):  # what has the bits of the first mostly fits into the second as well
        if all(torch.equal(part.to(dtype).to(part.dtype), part) for part in (start, tensor)):
            return dtype
    return None


def _distance(a: Tensor, b: Tensor) -> float:
    return length_of(x.float() - y.float() for x, y in zip(flat_parts(a), flat_parts(b), strict=True))
