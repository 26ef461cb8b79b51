"""Iso-C (Marczak et al. 2025) in its continual form (docs/methods.md, Iso-C)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from safemerge_pl.maths.linalg import polar_factor
from safemerge_pl.methods.base import MergeMethod, Scope, Stack, StackResult, mean_rule, require_numbers

__all__ = ["IsoC"]


@dataclass
class IsoC(MergeMethod):
    r"""Give the sum of both vectors one singular value, the mean of its own: :math:`X = \bar\sigma\,UV^\top`.

    Acts on every 2-D tensor; other tensors take the mean rule; the first task is taken whole.

    Args:
        scaling: factor of the merged vector.
        inflate: also raise directions that the sum does not have (rank-deficient matrices), as the original does;
            their directions are arbitrary. Off by default: for full fine-tunes there is no difference.
    """

    label: ClassVar[str] = "Iso-C"
    concurrent: ClassVar[bool] = True
    scope: ClassVar[Scope] = "matrix"
    merges_rest: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    scaling: float = 1.0
    inflate: bool = False

    def __post_init__(self) -> None:
        require_numbers(self, finite=("scaling",))

    def fold_stack(self, stack: Stack) -> StackResult:
        """Merge one stack."""
        if stack.index == 1:
            return StackResult(stack.incoming.clone())
        merged = make_isotropic(stack.merged_vector + stack.task_vector, inflate=self.inflate)
        return StackResult(stack.pretrained + self.scaling * merged)

    def fold_rest(self, stack: Stack) -> StackResult:
        """Apply the mean rule, with the same scaling."""
        result = mean_rule(stack).merged
        return StackResult(stack.pretrained + self.scaling * (result - stack.pretrained) if stack.index > 1 else result)


def make_isotropic(matrices: Tensor, *, inflate: bool = False) -> Tensor:
    r"""Replace all singular values by their mean over ``min(d_out, d_in)``, ``(L, d_out, d_in)`` in and out.

    Example:
        >>> import torch
        >>> make_isotropic(torch.tensor([[[3.0, 0.0], [0.0, 1.0]]])).tolist()
        [[[2.0, 0.0], [0.0, 2.0]]]
    """
    values, polar = polar_factor(matrices, tolerance=0.0 if inflate else None)
    return values.mean(1)[:, None, None] * polar
