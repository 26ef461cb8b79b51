"""NUFILT, null-space filtering (Qiu et al. 2026, METHODS 9)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from safemerge_pl.linalg import right_singular_basis
from safemerge_pl.methods.base import MergeMethod, Scope, Stack, StackResult, clock, require_numbers
from safemerge_pl.recovery import initial_factors

__all__ = ["NUFILT", "nufilt_loss_and_gradients"]


@dataclass
class NUFILT(MergeMethod):
    r"""Filter the incoming vector out of the old tasks' input subspace and recover what the new task lost.

    :math:`\theta_t = \theta_{t-1} + \tau(P + BA)` with :math:`P = I - V_oV_o^\top`; the factors are trained to match
    the task vector on its own leading directions without touching the old ones. Acts on the selected layers.

    Args:
        null_rank: directions of the accumulated vector that are filtered out.
        recovery_rank: rank of the correction.
        task_rank: directions of the task vector that are restored.
        num_steps: Adam steps a task, from the second task on.
        lr: Adam's learning rate.
        filter_first: at the first task, filter the first ``null_rank`` input coordinates, as the original code does
            when it decomposes a zero matrix; off by default, for nothing is to be protected yet.
        seed: seeds the start of the correction.

    Raises:
        ValueError: if a value is out of range.
    """

    label: ClassVar[str] = "NUFILT"
    concurrent: ClassVar[bool] = True
    scope: ClassVar[Scope] = "selected_out"

    null_rank: int = 128
    recovery_rank: int = 64
    task_rank: int = 8
    num_steps: int = 50
    lr: float = 1e-3
    filter_first: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("null_rank", "recovery_rank", "task_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not self.lr > 0 or self.num_steps < 0:
            raise ValueError(f"`lr` must be above 0 and `num_steps` at least 0, got {self.lr} and {self.num_steps}.")
        whole = ("null_rank", "recovery_rank", "task_rank", "num_steps", "seed")
        require_numbers(self, whole=whole, finite=("lr",))

    def fold_stack(self, stack: Stack) -> StackResult:
        """Filter, recover and add one stack."""
        tau = stack.task_vector
        if stack.index == 1:
            update = tau.clone()
            if self.filter_first:
                update[:, :, : min(self.null_rank, *tau.shape[1:])] = 0
            return StackResult(stack.merged + update)
        old = right_singular_basis(stack.merged_vector, self.null_rank)
        new = right_singular_basis(tau, self.task_rank)
        filtered = tau - (tau @ old) @ old.mT
        target = (tau - stack.merged_vector - filtered) @ new
        rank = min(self.recovery_rank, *tau.shape[1:])
        a = initial_factors(stack.layers, rank, tau.shape[2], seed=self.seed, index=stack.index).to(tau)
        b = tau.new_zeros(tau.shape[0], tau.shape[2], rank)
        start = clock(tau.device)
        optimizer = torch.optim.Adam([a, b], lr=self.lr)
        losses = []
        for _ in range(self.num_steps):
            loss, a.grad, b.grad = nufilt_loss_and_gradients(tau, a, b, old, new, target)
            losses.append(loss)
            optimizer.step()
        losses.append(nufilt_loss_and_gradients(tau, a, b, old, new, target)[0])
        seconds = clock(tau.device) - start
        merged = stack.merged + filtered + (tau @ b) @ a
        return StackResult(merged, losses=torch.stack(losses), solve_seconds=seconds)


def nufilt_loss_and_gradients(
    tau: Tensor, a: Tensor, b: Tensor, old: Tensor, new: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Loss :math:`\|T - \tau BAV_n\|_F^2 + \|\tau BAV_o\|_F^2` of each layer and its gradients (METHODS 9.2).

    The filter removes the old directions, so the second term needs the correction alone.

    Args:
        tau: ``(L, d_out, d_in)``.
        a: ``(L, r, d_in)``.
        b: ``(L, d_in, r)``.
        old: :math:`V_o`, ``(L, d_in, r_o)``.
        new: :math:`V_n`, ``(L, d_in, r_n)``.
        target: :math:`T = (\tau - \bar\tau - \tau P)V_n`, ``(L, d_out, r_n)``.

    Returns:
        ``(L,)`` losses, gradient of ``a``, gradient of ``b``.
    """
    left, a_new, a_old = tau @ b, a @ new, a @ old
    miss, hit = left @ a_new - target, left @ a_old
    loss = miss.square().sum((1, 2)) + hit.square().sum((1, 2))
    grad_a = 2 * (left.mT @ miss @ new.mT + left.mT @ hit @ old.mT)
    grad_b = 2 * (tau.mT @ (miss @ a_new.mT + hit @ a_old.mT))
    return loss, grad_a, grad_b
