"""TSV-M, task singular vectors (Gargiulo et al. 2025), in its continual form (METHODS 7)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from safemerge_pl.linalg import numerical_rank_tolerance, polar_factor, thin_svd
from safemerge_pl.methods.base import MergeMethod, Scope, Stack, StackResult, mean_rule, require_numbers

__all__ = ["TSVM"]


@dataclass
class TSVM(MergeMethod):
    r"""Keep half of the spectrum of each vector and make the kept directions of both orthogonal.

    With :math:`k = \lfloor\min(o, d)/2\rfloor`: concatenate the leading singular vectors, replace both sides by their
    polar factors, and put the singular values back: :math:`X = U_\perp\,\mathrm{diag}(S)\,V_\perp^\top`. Acts on every
    2-D tensor; other tensors take the mean rule; the first task is taken whole.

    Args:
        scaling: factor of the merged vector.
    """

    label: ClassVar[str] = "TSV-M"
    concurrent: ClassVar[bool] = True
    scope: ClassVar[Scope] = "matrix"
    merges_rest: ClassVar[bool] = True

    scaling: float = 1.0

    def __post_init__(self) -> None:
        require_numbers(self, finite=("scaling",))

    def fold_stack(self, stack: Stack) -> StackResult:
        """Merge one stack."""
        if stack.index == 1:
            return StackResult(stack.incoming.clone())
        half = min(stack.pretrained.shape[1:]) // 2
        if not half:  # half of one direction is none
            return StackResult(stack.pretrained.clone())
        parts = [thin_svd(vector) for vector in (stack.merged_vector, stack.task_vector)]
        left, values, right = (torch.cat([part[i][..., :half] for part in parts], dim=-1) for i in range(3))
        # directions that a vector of low rank does not have are arbitrary: they carry a zero singular value
        tolerance = numerical_rank_tolerance(tuple(stack.pretrained.shape), stack.pretrained.dtype)
        largest = torch.cat([part[1][:, :1].expand(-1, half) for part in parts], dim=1)
        exists = (values > tolerance * largest)[:, None]
        left, right = (
            polar_factor(torch.where(exists, side, 0.0), precision=stack.pretrained.dtype)[1] for side in (left, right)
        )
        merged = ((left * torch.where(exists, values[:, None], 0.0)) @ right.mT).to(stack.pretrained.dtype)
        return StackResult(stack.pretrained + self.scaling * merged)

    def fold_rest(self, stack: Stack) -> StackResult:
        """Average with what is there."""
        return mean_rule(stack)
