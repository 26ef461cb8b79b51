"""TSV-M, task singular vectors (Gargiulo et al. 2025), in its continual form (docs/methods.md, TSV-M)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from safemerge_pl.maths.linalg import orthogonalize_jointly, thin_svd
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
    elementwise: ClassVar[bool] = True

    scaling: float = 1.0

    def __post_init__(self) -> None:
        require_numbers(self, finite=("scaling",))

    def fold_stack(self, stack: Stack) -> StackResult:
        """Merge one stack."""
        if stack.index == 1:
            return StackResult(stack.incoming.clone())
        half = min(stack.pretrained.shape[1:]) // 2
        if not half:  # a rank-1 matrix keeps floor(1/2) = 0 directions
            return StackResult(stack.pretrained.clone())
        old, new = (thin_svd(vector, lambda _: half) for vector in (stack.merged_vector, stack.task_vector))
        kind = stack.pretrained.dtype
        left, right = (orthogonalize_jointly(old[side], new[side], kind) for side in (0, 2))
        values = torch.cat([old[1][:, :half], new[1][:, :half]], dim=1)
        merged = (left * values[:, None]).to(kind) @ right.mT.to(kind)
        return StackResult(stack.pretrained + self.scaling * merged)

    def fold_rest(self, stack: Stack) -> StackResult:
        """Apply the mean rule."""
        return mean_rule(stack)
