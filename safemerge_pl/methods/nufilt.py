"""NUFILT, null-space filtering (Qiu et al. 2026; docs/methods.md, NUFILT)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from safemerge_pl.maths.adam import Adam
from safemerge_pl.maths.linalg import right_singular_basis
from safemerge_pl.maths.recovery import initial_factors
from safemerge_pl.methods.base import (
    MergeMethod,
    Scope,
    Stack,
    StackResult,
    clock,
    energies,
    recovered_share,
    require_numbers,
    share_of,
)

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
        num_steps: Adam steps per task, from the second task on.
        lr: Adam's learning rate.
        filter_first: at the first task, filter the first ``null_rank`` input coordinates, as the original code does
            when it decomposes a zero matrix; off by default, because there is nothing to protect yet.
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
            return StackResult(stack.merged + update, taken=share_of(energies(update), energies(tau)))
        old = right_singular_basis(stack.merged_vector, self.null_rank)
        new = right_singular_basis(tau, self.task_rank)
        filtered = tau - (tau @ old) @ old.mT
        target = torch.cat(
            [(tau - stack.merged_vector - filtered) @ new, tau.new_zeros(*tau.shape[:2], old.shape[2])], dim=2
        )
        directions = torch.cat([new, old], dim=2)
        rank = min(self.recovery_rank, *tau.shape[1:])
        a = initial_factors(stack.layers, rank, tau.shape[2], seed=self.seed, index=stack.index).to(tau)
        start = clock(tau.device)
        factors = torch.stack([a, torch.zeros_like(a)])  # A and the transpose of B
        adam, losses = Adam(factors, self.lr), []
        for step in range(self.num_steps + 1):
            loss, *gradients = nufilt_loss_and_gradients(tau, factors[0], factors[1].mT, directions, target)
            losses.append(loss)
            if step < self.num_steps:
                torch.stack([gradients[0], gradients[1].mT], out=adam.gradient)
                adam.step()
        a, b = factors[0], factors[1].mT
        seconds = clock(tau.device) - start
        correction, whole = (tau @ b) @ a, energies(tau)
        return StackResult(
            stack.merged + filtered + correction,
            losses=torch.stack(losses),
            solve_seconds=seconds,
            taken=share_of(energies(filtered), whole),
            recovered=recovered_share((tau - filtered) @ new, correction @ new, whole),
        )


def nufilt_loss_and_gradients(
    tau: Tensor, a: Tensor, b: Tensor, directions: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute the loss :math:`\|T - \tau BAV_n\|_F^2 + \|\tau BAV_o\|_F^2` per layer, and its gradients.

    The filter removes the old directions, so the second term needs the correction alone, and both terms are one
    residual :math:`E = \tau BA[V_n \mid V_o] - [T \mid 0]`.

    Args:
        tau: ``(L, d_out, d_in)``.
        a: ``(L, r, d_in)``.
        b: ``(L, d_in, r)``.
        directions: :math:`[V_n \mid V_o]`, ``(L, d_in, r_n + r_o)``.
        target: :math:`[(\tau - \bar\tau - \tau P)V_n \mid 0]`, ``(L, d_out, r_n + r_o)``.

    Returns:
        ``(L,)`` losses, gradient of ``a``, gradient of ``b``.
    """
    left, right = tau @ b, a @ directions
    residual = torch.baddbmm(target, left, right, beta=-1)
    loss = residual.square().sum((1, 2))
    grad_a = 2 * (left.mT @ residual) @ directions.mT
    grad_b = 2 * tau.mT @ (residual @ right.mT)
    return loss, grad_a, grad_b
