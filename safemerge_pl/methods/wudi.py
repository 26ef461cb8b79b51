"""WUDI-Merging (Cheng et al. 2025) in its continual form (METHODS 4)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from safemerge_pl.methods.base import MergeMethod, Scope, Stack, StackResult, clock, mean_rule, require_numbers

__all__ = ["WUDIMerging", "wudi_loss_and_gradient"]


@dataclass
class WUDIMerging(MergeMethod):
    r"""Move the sum of both vectors until it interferes least with either one's input subspace.

    Minimises :math:`\sum_i \|(X - \tau_i)\tau_i^\top\|_F^2 / \|\tau_i\|_F^2` over every 2-D tensor from
    :math:`X = \bar\tau + \tau`, by Adam on the Gram matrices :math:`\tau_i^\top\tau_i`. Other tensors take the mean
    rule; the first task is taken whole.

    Args:
        lr: Adam's learning rate.
        num_steps: Adam steps a task.

    Raises:
        ValueError: if a value is out of range.
    """

    label: ClassVar[str] = "WUDI-Merging"
    concurrent: ClassVar[bool] = True
    scope: ClassVar[Scope] = "matrix"
    merges_rest: ClassVar[bool] = True

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
        vectors = torch.stack([stack.merged_vector, stack.task_vector])  # (2, L, d_out, d_in)
        sizes = vectors.square().sum((2, 3), keepdim=True)
        weights = torch.where(sizes > 0, 1 / sizes, 0.0)  # an empty vector has no subspace to protect
        grams = weights * (vectors.mT @ vectors)  # (2, L, d_in, d_in)
        x = vectors.sum(0)
        start = clock(x.device)
        optimizer = torch.optim.Adam([x], lr=self.lr)
        losses = []
        for _ in range(self.num_steps):
            loss, x.grad = wudi_loss_and_gradient(x, vectors, grams)
            losses.append(loss)
            optimizer.step()
        losses.append(wudi_loss_and_gradient(x, vectors, grams)[0])
        return StackResult(stack.pretrained + x, losses=torch.stack(losses), solve_seconds=clock(x.device) - start)

    def fold_rest(self, stack: Stack) -> StackResult:
        """Average with what is there."""
        return mean_rule(stack)


def wudi_loss_and_gradient(x: Tensor, vectors: Tensor, grams: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each matrix and its gradient, without ever building a ``d_out x d_out`` product.

    Args:
        x: ``(L, d_out, d_in)``.
        vectors: ``(n, L, d_out, d_in)``.
        grams: their Gram matrices over their squared norms, ``(n, L, d_in, d_in)``.

    Returns:
        ``(L,)`` and ``(L, d_out, d_in)``.

    Example:
        >>> one = torch.ones(1, 1, 1, 1)
        >>> wudi_loss_and_gradient(3 * one[0], one, one)
        (tensor([4.]), tensor([[[4.]]]))
    """
    apart = x - vectors
    product = apart @ grams
    return (product * apart).sum((0, 2, 3)), 2 * product.sum(0)
