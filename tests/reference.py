"""SAFE-Merge as Algorithm 1 of the paper writes it: one layer at a time, float64, full SVDs, explicit projectors.

Slow on purpose and written apart from the package, which must equal it. The one thing borrowed is the random start of
``A``, because those numbers are data. Equation numbers are the paper's.
"""

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from safemerge_pl.maths.recovery import initial_factors

FLOAT64_EPS = torch.finfo(torch.float64).eps
FLOAT32_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Settings:
    """Symbols of Algorithm 1 under the package's names, and ``rank_eps``: rounding error of the data's own dtype.

    The twin always computes in float64; it has to be told where the numerical rank of float32 data ends.
    """

    keep_ratio: float = 0.5
    scoring_rank: int = 128
    recovery_rank: int = 64
    task_rank: int = 8
    plasticity: float = 0.8
    regularization: float = 0.1
    num_steps: int = 50
    lr: float = 1e-3
    utility_weight: float = 1.0
    keep: str = "low"
    use_mask: bool = True
    use_recovery: bool = True
    seed: int = 0
    rank_eps: float = FLOAT64_EPS


def top_right_singular_vectors(matrix: Tensor, rank: int, rank_eps: float) -> Tensor:
    """The ``V`` of section 4.1, ``(d_in, r)``: at most ``rank`` columns, none beyond the numerical rank."""
    _, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    numerical_rank = int((values > max(matrix.shape) * rank_eps * values[0]).sum())
    return vh[: min(rank, numerical_rank)].T


def orth(vectors: Tensor, rank_eps: float) -> Tensor:
    """``orth(.)`` of Eqs. 3 and 5: an orthonormal basis of the column space, with as many columns as it has."""
    left, values, _ = torch.linalg.svd(vectors, full_matrices=False)
    return left[:, values > max(vectors.shape) * rank_eps]


def general_basis(theta0: Tensor, settings: Settings) -> Tensor:
    """``Q_0``, Eq. 3."""
    return orth(top_right_singular_vectors(theta0, settings.scoring_rank, settings.rank_eps), settings.rank_eps)


def task_basis(tau: Tensor, q0: Tensor, settings: Settings) -> Tensor:
    """``Q_new``, Eq. 5."""
    v_t = top_right_singular_vectors(tau, settings.scoring_rank, settings.rank_eps)
    return orth((torch.eye(len(q0), dtype=q0.dtype) - q0 @ q0.T) @ v_t, settings.rank_eps)


def risk(tau: Tensor, q0: Tensor, q_new: Tensor, utility_weight: float) -> Tensor:
    """``R``, Eq. 6; Eq. 4 for ``utility_weight=0``."""
    return (tau @ (q0 @ q0.T)) ** 2 - utility_weight * (tau @ (q_new @ q_new.T)) ** 2


def mask(scores: Tensor, settings: Settings) -> Tensor:
    """``M``, Eq. 7; for ``keep="high"`` the other end of the ranking (the negative selection of Fig. 1)."""
    if not settings.use_mask:
        return torch.ones_like(scores, dtype=torch.bool)
    if settings.keep == "low":
        return scores <= float(numpy.quantile(scores.numpy(), settings.keep_ratio))
    return scores >= float(numpy.quantile(scores.numpy(), 1 - settings.keep_ratio))


def projector(vectors: Tensor) -> Tensor:
    """``G = V V^T``, Eq. 9."""
    return vectors @ vectors.T


def update(tau: Tensor, m: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``Delta``, Eq. 8."""
    return m * tau + m * (b @ a)


def loss_old(delta: Tensor, g_old: Tensor) -> Tensor:
    """Eq. 10."""
    return ((delta @ g_old) ** 2).sum()


def loss_new(tau: Tensor, tau_bar: Tensor, delta: Tensor, g_new: Tensor) -> Tensor:
    """Eq. 11."""
    return ((tau @ g_new - (tau_bar + delta) @ g_new) ** 2).sum()


def objective(tau: Tensor, tau_bar: Tensor, m: Tensor, a: Tensor, b: Tensor, index: int, settings: Settings) -> Tensor:
    """Eq. 12, with ``G_old`` (0 at t = 1) and ``G_new`` built anew each time, as Algorithm 1 does."""
    g_old = torch.zeros(tau.shape[1], tau.shape[1], dtype=tau.dtype)
    if index > 1:
        g_old = projector(top_right_singular_vectors(tau_bar, settings.scoring_rank, settings.rank_eps))
    g_new = projector(top_right_singular_vectors(tau, settings.task_rank, settings.rank_eps))
    delta = update(tau, m, a, b)
    return (
        settings.plasticity * loss_new(tau, tau_bar, delta, g_new)
        + (1 - settings.plasticity) * loss_old(delta, g_old)
        + settings.regularization * ((m * (b @ a)) ** 2).sum()
    )


def recover(
    tau: Tensor, tau_bar: Tensor, m: Tensor, *, layer: str, index: int, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """The K-loop of Algorithm 1 for one layer: the final ``A``, ``B`` and the ``K + 1`` losses on the way."""
    d_out, d_in = tau.shape
    rank = min(settings.recovery_rank, d_out, d_in)
    a = initial_factors([layer], rank, d_in, seed=settings.seed, index=index)[0].double().requires_grad_()
    b = torch.zeros(d_out, rank, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([a, b], lr=settings.lr)
    losses = []
    for _ in range(settings.num_steps):
        optimizer.zero_grad()
        loss = objective(tau, tau_bar, m, a, b, index, settings)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses.append(objective(tau, tau_bar, m, a, b, index, settings).detach())
    return a.detach(), b.detach(), torch.stack(losses)


def reference_fold(
    theta0: Tensor, merged: Tensor, incoming: Tensor, *, layer: str, index: int, settings: Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One layer of one step of Algorithm 1 (Eq. 13).

    Args:
        theta0: pretrained weight, ``(d_out, d_in)``.
        merged: merged weight before this task.
        incoming: fine-tuned weight.
        layer: canonical name, for the start of ``A``.
        index: t, from 1.
        settings: hyper-parameters.

    Returns:
        The new merged weight, ``M`` (bool), ``Delta``, and the ``(K + 1,)`` losses (``None`` without recovery).
    """
    theta0, merged, incoming = theta0.double(), merged.double(), incoming.double()
    tau, tau_bar = incoming - theta0, merged - theta0
    q0 = general_basis(theta0, settings)
    m = mask(risk(tau, q0, task_basis(tau, q0, settings), settings.utility_weight), settings)
    if settings.use_recovery:
        a, b, losses = recover(tau, tau_bar, m, layer=layer, index=index, settings=settings)
        delta = update(tau, m, a, b)
    else:
        losses, delta = None, m * tau
    return merged + delta, m, delta, losses


@dataclass(frozen=True)
class ShareSettings:
    """Settings of SAFE-Share; ranks are numbers of directions here."""

    keep_ratio: float = 0.5
    scoring_rank: int = 128
    shared_rank: int = 192
    use_mask: bool = True
    rank_eps: float = FLOAT64_EPS


def safe_share(theta0: Tensor, stream: list[Tensor], settings: ShareSettings) -> list[Tensor]:
    """The accumulated vector of one layer after every task of a stream, as the method's definition reads."""
    theta0 = theta0.double()
    accumulated, count, found = torch.zeros_like(theta0), 0, []
    for theta in stream:
        tau = theta.double() - theta0
        if not tau.any():
            found.append(accumulated)
            continue
        count += 1
        q0 = top_right_singular_vectors(theta0, settings.scoring_rank, settings.rank_eps)
        scores = (tau @ (q0 @ q0.T)) ** 2
        kept = scores <= float(numpy.quantile(scores.numpy(), settings.keep_ratio))
        update = tau * kept if settings.use_mask else tau
        if accumulated.any() and settings.shared_rank:
            shared = projector(top_right_singular_vectors(accumulated, settings.shared_rank, settings.rank_eps))
        else:
            shared = torch.zeros(len(theta0.T), len(theta0.T), dtype=torch.float64)
        eye = torch.eye(len(shared), dtype=torch.float64)
        accumulated = accumulated + update @ (eye - shared) + (update - accumulated) @ shared / count
        found.append(accumulated)
    return found


def response(updates: list[Tensor], pretrained: list[Tensor]) -> float:
    """What the pretrained matrices read of the updates, against what they read of themselves."""
    pairs = [(a.double(), w0.double()) for a, w0 in zip(updates, pretrained, strict=True)]
    read = sum((a @ w0.T).norm() ** 2 for a, w0 in pairs)
    own = sum((w0 @ w0.T).norm() ** 2 for _, w0 in pairs)
    return float((read / own) ** 0.5)
