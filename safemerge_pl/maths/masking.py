"""Step 1 of SAFE-Merge: how risky each entry of a task vector is, and which entries are kept (Eqs. 4-7)."""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

__all__ = ["Keep", "keep_mask", "risk_score"]

Keep = Literal["low", "high"]


def risk_score(
    task_vector: Tensor, general_basis: Tensor, task_basis: Tensor | None, utility_weight: float = 1.0
) -> Tensor:
    r"""Compute each entry's risk: what it overwrites less what it is worth, Eq. 6 (Eq. 4 for ``utility_weight=0``).

    .. math:: R = (\tau Q_0 Q_0^\top)^2 - \beta\,(\tau Q_{new} Q_{new}^\top)^2 \quad\text{entry by entry}

    Args:
        task_vector: :math:`\tau`, ``(L, d_out, d_in)``.
        general_basis: :math:`Q_0`, ``(L, d_in, r)``, directions of the pretrained weights.
        task_basis: :math:`Q_{new}`, ``(L, d_in, s)``; ``None`` only with ``utility_weight=0``.
        utility_weight: :math:`\beta`, 1 is Eq. 6, 0 the general-only score of Eq. 4.

    Returns:
        ``(L, d_out, d_in)``, in squared weight units.

    Raises:
        ValueError: if ``task_basis`` is missing where it has a weight.

    Example:
        >>> tau = torch.tensor([[[2.0, 1.0]]])
        >>> q0, q_new = torch.tensor([[[1.0], [0.0]]]), torch.tensor([[[0.0], [1.0]]])
        >>> risk_score(tau, q0, q_new).tolist(), risk_score(tau, q0, None, utility_weight=0).tolist()
        ([[[4.0, -1.0]]], [[[4.0, 0.0]]])
    """
    risk = ((task_vector @ general_basis) @ general_basis.mT).square()
    if utility_weight != 0:
        if task_basis is None:
            raise ValueError("`task_basis` is needed unless `utility_weight` is 0.")
        risk -= utility_weight * ((task_vector @ task_basis) @ task_basis.mT).square()
    return risk


def keep_mask(risk: Tensor, keep_ratio: float, keep: Keep = "low") -> Tensor:
    r"""Mask the entries that are merged, Eq. 7: :math:`R \le \mathrm{Quantile}_\rho(R)` layer by layer.

    The quantile with linear interpolation lies between two neighbours of the sorted scores, so comparing with the
    lower neighbour gives the same mask; that needs a selection, not a sort. Ties are kept together: many equal
    scores (rows that were never trained) can keep more than the asked share. ``keep_ratio=0`` keeps the least risky
    entry (and its ties), 1 keeps all.

    Args:
        risk: ``(L, d_out, d_in)``.
        keep_ratio: :math:`\rho` in ``[0, 1]``.
        keep: ``"low"`` keeps the least risky entries, ``"high"`` the riskiest (the paper's negative control).

    Returns:
        bool ``(L, d_out, d_in)``, ``True`` where the update is merged.

    Raises:
        ValueError: if ``keep_ratio`` or ``keep`` is not one of the above.

    Example:
        >>> keep_mask(torch.tensor([[[4.0, -1.0], [0.0, 9.0]]]), 0.5).tolist()
        [[[False, True], [True, False]]]
    """
    if not 0.0 <= keep_ratio <= 1.0:
        raise ValueError(f"`keep_ratio` must be in [0, 1], got {keep_ratio}.")
    if keep not in ("low", "high"):
        raise ValueError(f"`keep` must be 'low' or 'high', got {keep!r}.")
    scores = (risk if keep == "low" else -risk).flatten(1)  # (L, d_out * d_in)
    position = math.floor(keep_ratio * (scores.shape[1] - 1) + 1e-9)  # 1e-9: 0.3 * 10 is 3, not 2.999...
    return (scores <= _order_statistic(scores, position)).view(risk.shape)


def _order_statistic(scores: Tensor, position: int) -> Tensor:
    """Find the entry at ``position`` (from 0) of each sorted row, ``(L, n) -> (L, 1)``."""
    if scores.device.type == "cpu":  # linear in the worst case; torch's selection is quadratic on sorted input
        parts = np.partition(scores.numpy(), position, axis=1)
        return torch.from_numpy(parts[:, position : position + 1])
    if torch.are_deterministic_algorithms_enabled():  # CUDA's kthvalue is refused there
        return scores.sort(dim=1).values[:, position : position + 1]
    return scores.kthvalue(position + 1, dim=1, keepdim=True).values
