"""WUDI-Merging (Cheng et al. 2025) in its continual form (docs/methods.md, WUDI-Merging)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from safemerge_pl.maths.adam import Adam
from safemerge_pl.methods.base import MergeMethod, Scope, Stack, StackResult, clock, mean_rule, require_numbers

__all__ = ["WUDIMerging", "wudi_loss_and_gradient"]

_ROWS, _ENTRIES = 128, 2**16
"""Rows solved together on a CPU: enough for a fast product, few enough to stay in cache from step to step."""


@dataclass
class WUDIMerging(MergeMethod):
    r"""Move the sum of both vectors until it interferes least with either one's input subspace.

    Minimises :math:`\sum_i \|(X - \tau_i)\tau_i^\top\|_F^2 / \|\tau_i\|_F^2` over every 2-D tensor from
    :math:`X = \bar\tau + \tau`, by Adam on the Gram matrices :math:`\tau_i^\top\tau_i`. Other tensors take the mean
    rule; the first task is taken whole.

    Args:
        lr: Adam's learning rate.
        num_steps: Adam steps per task.

    Raises:
        ValueError: if a value is out of range.
    """

    label: ClassVar[str] = "WUDI-Merging"
    concurrent: ClassVar[bool] = True
    scope: ClassVar[Scope] = "matrix"
    merges_rest: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    lr: float = 1e-5
    num_steps: int = 50

    def __post_init__(self) -> None:
        if not self.lr > 0 or self.num_steps < 0:
            raise ValueError(f"`lr` must be above 0 and `num_steps` at least 0, got {self.lr} and {self.num_steps}.")
        require_numbers(self, whole=("num_steps",), finite=("lr",))

    def fold_stack(self, stack: Stack) -> StackResult:
        """Solve one stack."""
        if stack.index == 1:
            return StackResult(stack.incoming.clone())
        old, new = stack.merged_vector, stack.task_vector
        old_gram, new_gram = _gram(old), _gram(new)
        cross, second = new @ old_gram, old @ new_gram
        at_start = (cross * new).sum((1, 2)) + (second * old).sum((1, 2))
        cross += second
        gram = old_gram.add_(new_gram)
        moved = torch.zeros_like(new)
        rows = max(_ROWS, _ENTRIES // moved[:, 0].numel()) if moved.device.type == "cpu" else moved.shape[1]
        start = clock(moved.device)
        losses = torch.stack(  # the rows are independent of each other
            [
                self._solve(*part, gram)
                for part in zip(torch.split(moved, rows, 1), torch.split(cross, rows, 1), strict=True)
            ]
        ).sum(0)
        seconds = clock(moved.device) - start
        return StackResult(stack.pretrained + (old + new).add_(moved), losses=losses + at_start, solve_seconds=seconds)

    def _solve(self, moved: Tensor, cross: Tensor, gram: Tensor) -> Tensor:
        """Solve for some rows: write how far they move to ``moved`` and return their losses ``(K + 1, L)``."""
        x, losses = torch.zeros_like(cross), [cross.new_zeros(len(cross))]  # the start, which takes no product
        adam = Adam(x, self.lr)
        torch.mul(cross, 2, out=adam.gradient)
        for _ in range(self.num_steps):
            adam.step()
            losses.append(wudi_loss_and_gradient(x, cross, gram, out=adam.gradient)[0])
        moved.copy_(x)
        return torch.stack(losses)

    def fold_rest(self, stack: Stack) -> StackResult:
        """Apply the mean rule."""
        return mean_rule(stack)


def wudi_loss_and_gradient(
    moved: Tensor, cross: Tensor, gram: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Compute the loss of each matrix and its gradient, without ever building a ``d_out x d_out`` product.

    With :math:`X = \bar\tau + \tau + Y` and :math:`G_i = \tau_i^\top\tau_i / \|\tau_i\|^2` what one vector sees of
    :math:`X - \tau_i` is the other vector and :math:`Y`, so the objective is
    :math:`\langle Y(G_1 + G_2) + 2C,\, Y\rangle` and a constant, with :math:`C = \tau G_1 + \bar\tau G_2`.

    Args:
        moved: :math:`Y`, ``(L, rows, d_in)``.
        cross: :math:`C`, the same rows of it.
        gram: :math:`G_1 + G_2`, ``(L, d_in, d_in)``.
        out: where to write the gradient.

    Returns:
        Loss above that of the start ``(L,)``, and gradient ``(L, rows, d_in)``.

    Example:
        >>> one = torch.ones(1, 1, 1)
        >>> wudi_loss_and_gradient(3 * one, one, 2 * one)
        (tensor([24.]), tensor([[[14.]]]))
    """
    half = torch.baddbmm(cross, moved, gram, out=out)
    loss = ((half + cross) * moved).sum((1, 2))
    return loss, half.mul_(2)


def _gram(vectors: Tensor) -> Tensor:
    """Compute Gram matrices ``(L, d_in, d_in)`` over squared norms; zero for a zero vector, which protects nothing."""
    size = vectors.square().sum((1, 2), keepdim=True)
    return (vectors.mT @ vectors).mul_(torch.where(size > 0, 1 / size, 0.0))
