"""Ties-Merging (Yadav et al. 2023) in its continual form (METHODS 3)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from safemerge_pl.cores import map_on_cores
from safemerge_pl.methods.base import MergeMethod, Scope, Stack, StackResult, Vectors, require_numbers

__all__ = ["TiesMerging", "elect_and_sum", "trim_threshold"]


@dataclass
class TiesMerging(MergeMethod):
    r"""Trim, elect signs and sum the accumulated and the incoming vector, over the whole model at once.

    Each vector keeps its ``top_k`` largest entries; each coordinate takes the sign of the sum, and only values of that
    sign are added: :math:`\theta_t = \theta_{t-1} + s\,\tau_{ties}`. The first task is added untrimmed.

    Args:
        scaling: :math:`s`; the paper uses 0.3 for 8 tasks, 0.1 for 14 and 20.
        top_k: share of entries that each vector keeps, in ``(0, 1]``.

    Raises:
        ValueError: if ``top_k`` is out of range.
    """

    label: ClassVar[str] = "Ties-Merging"
    concurrent: ClassVar[bool] = True
    scope: ClassVar[Scope] = "none"
    merges_rest: ClassVar[bool] = True

    scaling: float = 0.3
    top_k: float = 0.2
    _thresholds: tuple[float, float] = field(default=(0.0, 0.0), init=False, repr=False)
    _majority: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.top_k <= 1.0:
            raise ValueError(f"`top_k` must be in (0, 1], got {self.top_k}.")
        require_numbers(self, finite=("scaling", "top_k"))

    def settings(self) -> dict[str, Any]:
        """Without what is found anew in every fold."""
        return {"scaling": self.scaling, "top_k": self.top_k}

    def prepare(self, index: int, vectors: Vectors) -> None:
        """Find both trim thresholds and the majority sign, with two flat vectors in memory."""
        if index == 1:
            return
        parts: list[list[np.ndarray[Any, Any]]] = [[], []]
        for _, *pair in vectors():
            for row, vector in zip(parts, pair, strict=True):
                row.append(vector.abs().cpu().numpy().reshape(-1))
        sizes = [np.concatenate(row) for row in parts]
        parts.clear()
        old, new = map_on_cores(lambda row: trim_threshold(row, self.top_k), sizes)
        sizes.clear()
        self._thresholds, signs = (old, new), 0
        for _, merged, task in vectors():
            signs += int((_trim(merged, old) + _trim(task, new)).sign().sum())
        self._majority = float(np.sign(signs))

    def fold_stack(self, stack: Stack) -> StackResult:
        """Add the elected sum of one tensor, of any shape."""
        if stack.index == 1:
            return StackResult(stack.merged + self.scaling * stack.task_vector)
        pair = (stack.merged_vector, stack.task_vector)
        trimmed = torch.stack([_trim(vector, limit) for vector, limit in zip(pair, self._thresholds, strict=True)])
        update = elect_and_sum(trimmed, self._majority)
        kept = (update != 0).flatten(1).float().mean(1)
        return StackResult(stack.merged + self.scaling * update, kept)

    fold_rest = fold_stack


def trim_threshold(sizes: "np.ndarray[Any, Any]", top_k: float) -> float:
    """Size from which on an entry is kept: the ``(D - floor(D * top_k))``-th smallest of ``D`` (METHODS 3.1).

    Args:
        sizes: absolute values, ``(D,)``; reordered in place.
        top_k: share to keep.

    Example:
        >>> trim_threshold(np.arange(10.0), 0.2)  # 7, 8 and 9 stay: one more than two
        7.0
    """
    place = len(sizes) - int(len(sizes) * top_k)
    place = max(place, 1) - 1
    sizes.partition(place)
    return float(sizes[place])


def elect_and_sum(trimmed: Tensor, majority: float | Tensor) -> Tensor:
    """Sum the values that have the sign of their coordinate's sum (METHODS 3.2, 3.3).

    Args:
        trimmed: ``(2, ...)``, accumulated and incoming vector after trimming.
        majority: sign that coordinates with a sum of 0 take.

    Example:
        >>> elect_and_sum(torch.tensor([[1.0, -3.0, 0.0], [2.0, 1.0, 0.0]]), 1.0).tolist()
        [3.0, -3.0, 0.0]
    """
    sign = trimmed.sum(0).sign()
    sign = torch.where(sign == 0, torch.as_tensor(majority, dtype=sign.dtype, device=sign.device), sign)
    return torch.where(trimmed * sign > 0, trimmed, 0.0).sum(0)


def _trim(vector: Tensor, threshold: float) -> Tensor:
    return torch.where(vector.abs() >= threshold, vector, 0.0)
