r"""Step 2 of SAFE-Merge: masked low-rank recovery (Eqs. 8-12), with the gradient written out by hand.

Notation: :math:`C = M \odot (BA)` is the correction, :math:`\Delta = M \odot \tau + C` the update. The projectors
of Eqs. 9-11 are never built: :math:`\|XVV^\top\|_F = \|XV\|_F` for orthonormal columns, so both task losses are one
residual :math:`E = \Delta W - T` with :math:`W = [\sqrt{1-\lambda}\,V_{old} \mid \sqrt{\lambda}\,V_{new}]` and
:math:`T = [0 \mid \sqrt{\lambda}\,(\tau - \bar\tau)V_{new}]`, and :math:`L = \|E\|_F^2 + \mu\|C\|_F^2`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from safemerge_pl.maths.adam import Adam
from safemerge_pl.runtime.cores import map_on_cores

__all__ = ["RecoveryProblem", "initial_factors", "solve_recovery"]


def initial_factors(layers: Sequence[str], recovery_rank: int, d_in: int, *, seed: int, index: int) -> Tensor:
    """Draw the start of the recovery factor ``A``: entries from N(0, 0.02^2), one private generator per layer.

    The generator is seeded by ``(seed, index, layer name)`` on the CPU, so the values depend neither on the order of
    the layers nor on device, process count or resume, and the global random state is not touched.

    Args:
        layers: canonical layer names, one per matrix of the stack.
        recovery_rank: rows of ``A``.
        d_in: columns of ``A``.
        seed: the run's seed.
        index: position of the task in the stream, from 1.

    Returns:
        float32 ``(L, recovery_rank, d_in)`` on the CPU.

    Example:
        >>> a = initial_factors(["vision.0.q", "vision.0.k"], 2, 3, seed=0, index=1)
        >>> torch.equal(a[1], initial_factors(["vision.0.k"], 2, 3, seed=0, index=1)[0])
        True
    """

    def draw(layer: str) -> Tensor:
        digest = hashlib.sha256(f"{seed}/{index}/{layer}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        noise = torch.randn(recovery_rank, d_in, generator=generator, dtype=torch.float32, device="cpu")
        return noise * 0.02

    return torch.stack(list(map_on_cores(draw, layers)))


@dataclass(frozen=True)
class RecoveryProblem:
    r"""The constants of Eqs. 8-12 for one stack of layers.

    Attributes:
        masked: the mask :math:`M` as 0 and 1 in the task vector's dtype, ``(L, d_out, d_in)``.
        directions: :math:`W`, ``(L, d_in, r)``.
        residual: :math:`E_0 = (M \odot \tau)W - T`, what is missed without any correction, ``(L, d_out, r)``.
        regularization: :math:`\mu`.
    """

    masked: Tensor
    directions: Tensor
    residual: Tensor
    regularization: float

    @classmethod
    def build(
        cls,
        task_vector: Tensor,
        merged_vector: Tensor,
        mask: Tensor,
        old_basis: Tensor | None,
        new_basis: Tensor,
        *,
        plasticity: float,
        regularization: float,
    ) -> "RecoveryProblem":
        r"""Fold the two task losses of Eq. 12 into one residual.

        Args:
            task_vector: :math:`\tau`, ``(L, d_out, d_in)``.
            merged_vector: :math:`\bar\tau`, ``(L, d_out, d_in)``.
            mask: bool ``(L, d_out, d_in)``.
            old_basis: :math:`V_{old}`, ``(L, d_in, r_p)``; ``None`` for the first task (Algorithm 1).
            new_basis: :math:`V_{new}`, ``(L, d_in, r_v)``.
            plasticity: :math:`\lambda` in ``[0, 1]``.
            regularization: :math:`\mu`, at least 0.
        """
        directions = plasticity**0.5 * new_basis
        target = (task_vector - merged_vector) @ directions
        if old_basis is not None:
            directions = torch.cat([(1 - plasticity) ** 0.5 * old_basis, directions], dim=2)
        masked = mask.to(task_vector.dtype)
        residual = (masked * task_vector) @ directions
        residual[:, :, -target.shape[2] :] -= target  # the old directions' target is zero
        return cls(masked, directions, residual, regularization)

    def correction(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        r"""Compute :math:`C = M \odot (BA)` of Eq. 8, ``(L, d_out, d_in)``; zero wherever the mask is."""
        return torch.bmm(b, a, out=out).mul_(self.masked)

    def loss_and_gradients(
        self, a: Tensor, b: Tensor, room: Sequence[Tensor | None] = (None,) * 5
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""Compute the loss of each layer (Eq. 12) and its gradients.

        With :math:`E = E_0 + CW` and :math:`H = M \odot (2EW^\top + 2\mu C)`: :math:`\partial L/\partial B = HA^\top`
        and :math:`\partial L/\partial A = B^\top H`. Sums, never means: Adam's ``eps`` is not scale-free.

        Args:
            a: :math:`A`, ``(L, r_l, d_in)``.
            b: :math:`B`, ``(L, d_out, r_l)``.
            room: tensors to write both gradients, :math:`C`, :math:`E` and :math:`H` to.

        Returns:
            ``(L,)`` losses, gradient of ``a``, gradient of ``b``.
        """
        grad_a, grad_b, kept_c, kept_e, kept_h = room
        correction = self.correction(a, b, kept_c)
        residual = torch.baddbmm(self.residual, correction, self.directions, out=kept_e)
        loss = _squared_norm(residual) + self.regularization * _squared_norm(correction)
        slope = torch.baddbmm(
            correction, residual, self.directions.mT, beta=2 * self.regularization, alpha=2, out=kept_h
        ).mul_(self.masked)
        return loss, torch.bmm(b.mT, slope, out=grad_a), torch.bmm(slope, a.mT, out=grad_b)

    def room(self) -> list[Tensor]:
        """Allocate tensors for the intermediate results of :meth:`loss_and_gradients`."""
        return [torch.empty_like(self.masked), torch.empty_like(self.residual), torch.empty_like(self.masked)]


def solve_recovery(problem: RecoveryProblem, recovery_a: Tensor, *, num_steps: int, lr: float) -> tuple[Tensor, Tensor]:
    r"""Run Adam on the factors from ``B = 0`` (Algorithm 1, inner loop).

    Adam is elementwise and the losses are separable, so the stacked solve equals one solve per layer.

    Args:
        problem: constants of the stack.
        recovery_a: start of :math:`A`, ``(L, r_l, d_in)``; not changed.
        num_steps: :math:`K`, at least 0.
        lr: Adam's learning rate; other settings are torch's defaults.

    Returns:
        The correction :math:`M \odot (BA)`, ``(L, d_out, d_in)``, and the losses ``(K + 1, L)``: before each step and
        after the last. Both stay on the device; nothing is synchronised inside the loop.

    Example:
        >>> one = torch.ones(1, 1, 1)
        >>> problem = RecoveryProblem.build(one, 0 * one, one > 0, None, one, plasticity=0.8, regularization=0.1)
        >>> correction, losses = solve_recovery(problem, 0.02 * one, num_steps=3, lr=1e-3)
        >>> correction.item(), losses[0].item()  # the whole task vector is kept: there is nothing to recover
        (0.0, 0.0)
    """
    start = recovery_a.to(problem.masked)
    (count, rank, d_in), d_out = start.shape, problem.masked.shape[1]
    factors = torch.cat([start.reshape(-1), start.new_zeros(count * d_out * rank)])
    adam = Adam(factors, lr)
    (a, b), (grad_a, grad_b) = (
        (flat[: start.numel()].view(count, rank, d_in), flat[start.numel() :].view(count, d_out, rank))
        for flat in (factors, adam.gradient)
    )
    room = [grad_a, grad_b, *problem.room()]
    losses = []
    for _ in range(num_steps):
        losses.append(problem.loss_and_gradients(a, b, room)[0])
        adam.step()
    losses.append(problem.loss_and_gradients(a, b, room)[0])
    return problem.correction(a, b), torch.stack(losses)


def _squared_norm(matrices: Tensor) -> Tensor:
    r"""Compute :math:`\|X\|_F^2` of each matrix, ``(L, m, n) -> (L,)``."""
    flat = matrices.flatten(1)
    norms: Tensor = torch.linalg.vecdot(flat, flat)
    return norms
