"""Ties-Merging (Yadav et al. 2023) in its continual form (docs/methods.md, Ties-Merging)."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from safemerge_pl.methods.base import (
    MergeMethod,
    Scope,
    Stack,
    StackResult,
    Vectors,
    add_up,
    energies,
    require_numbers,
    share_of,
)
from safemerge_pl.runtime.cores import flat_parts

__all__ = ["TiesMerging", "elect_and_sum", "trim_thresholds"]

_DIGIT = 16
"""Bits that are counted in one pass."""

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}

_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}


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
    elementwise: ClassVar[bool] = True

    scaling: float = 0.3
    top_k: float = 0.2
    _thresholds: tuple[float, float] = field(default=(0.0, 0.0), init=False, repr=False)
    _majority: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.top_k <= 1.0:
            raise ValueError(f"`top_k` must be in (0, 1], got {self.top_k}.")
        require_numbers(self, finite=("scaling", "top_k"))

    def settings(self) -> dict[str, Any]:
        """Return the settings without what every fold finds anew."""
        return {"scaling": self.scaling, "top_k": self.top_k}

    def prepare(self, index: int, vectors: Vectors) -> None:
        """Find both trim thresholds and the majority sign."""
        if index == 1:
            return
        old, new = self._thresholds = trim_thresholds(vectors, self.top_k)

        def signs(parts: Iterator[tuple[Tensor, Tensor]]) -> float:
            return sum(float((_trim(a, old) + _trim(b, new)).sign_().sum(dtype=torch.float64)) for a, b in parts)

        self._majority = float(np.sign(sum(vectors(signs))))

    def fold_stack(self, stack: Stack) -> StackResult:
        """Add the elected sum of one tensor, of any shape."""
        if stack.index == 1:
            return StackResult((self.scaling * stack.task_vector).add_(stack.merged))
        merged = stack.merged.clone(memory_format=torch.contiguous_format)
        kept = torch.zeros(len(merged), device=merged.device)
        sizes = torch.zeros(2, len(merged), dtype=torch.float64, device=merged.device)  # of what counts, and of all
        for row, *tensors in zip(range(len(kept)), merged, stack.pretrained, stack.incoming, strict=True):
            for target, base, incoming in zip(*map(flat_parts, tensors), strict=True):
                task = incoming - base
                pair = zip((target - base, task), self._thresholds, strict=True)
                trimmed = torch.stack([_trim(vector, limit) for vector, limit in pair])
                update = elect_and_sum(trimmed, self._majority)
                target.add_(update, alpha=self.scaling)
                kept[row] += torch.count_nonzero(update)
                counts = torch.where(trimmed[1] * update > 0, trimmed[1], 0.0)  # it has the elected sign
                sizes[:, row] += torch.stack([energies(counts[None])[0], energies(task[None])[0]])
        return StackResult(merged, kept / max(merged[0].numel(), 1), taken=share_of(*sizes))

    fold_rest = fold_stack


def trim_thresholds(vectors: Vectors, top_k: float) -> tuple[float, float]:
    """Find the size from which on an entry is kept: the ``(D - floor(D * top_k))``-th smallest of ``D``.

    The order of non-negative floats is that of their bits, so counting the values of sixteen bits at a time finds the
    exact size in two passes over float32, without ever holding the model's entries together.

    Args:
        vectors: passes over the tensors of the accumulated and the incoming vector.
        top_k: share to keep.

    Returns:
        The threshold of either vector.

    Example:
        >>> sizes = torch.arange(10.0)
        >>> trim_thresholds(lambda look: [look(iter([(sizes, -2 * sizes)]))], 0.2)  # 7, 8, 9 stay: one more than two
        (7.0, 14.0)
    """
    prefixes, places, shift, kind = [0, 0], [0, 0], 0, torch.float32
    while shift < torch.finfo(kind).bits:
        digits = _Digits(prefixes, shift)
        kind = max(vectors(digits.count), key=lambda found: torch.finfo(found).bits)
        counts = add_up(vectors, digits.counts)[:, 1:-1]
        if not shift:
            places = [max(size - int(size * top_k), 1) - 1 for size in counts.sum(1).tolist()]
        for row, below in enumerate(counts.cumsum(1)):
            digit = int(torch.searchsorted(below, places[row], right=True))
            prefixes[row] = prefixes[row] << _DIGIT | digit
            places[row] -= int(below[digit] - counts[row, digit])
        shift += _DIGIT
    old, new = torch.tensor(prefixes, dtype=_INTEGERS[kind]).view(kind).tolist()
    return old, new


class _Digits:
    """Counts of each value of the bits after the first ``shift``, behind a prefix.

    Attributes:
        counts: ``(2, 2 ** _DIGIT + 2)``, one row per vector; smaller and larger prefixes fall into the outer columns.
    """

    def __init__(self, prefixes: list[int], shift: int) -> None:
        self.counts = torch.zeros(2, 2**_DIGIT + 2, dtype=torch.long)
        self._prefixes, self._shift, self._lock = prefixes, shift, threading.Lock()

    def count(self, parts: Iterator[tuple[Tensor, Tensor]]) -> torch.dtype:
        """Count a tensor's entries, on any thread, and return its dtype."""
        size, kind = 2**_DIGIT, torch.float32
        for pair in parts:
            for row, part in enumerate(pair):
                kind = part.dtype
                bits = part.abs().view(_INTEGERS[kind])
                bits.bitwise_right_shift_(torch.finfo(kind).bits - self._shift - _DIGIT)
                bits.sub_(self._prefixes[row] << _DIGIT).clamp_(-1, size).add_(1)
                found = torch.bincount(bits).cpu()
                with self._lock:
                    self.counts[row, : len(found)] += found
        return kind


def elect_and_sum(trimmed: Tensor, majority: float | Tensor) -> Tensor:
    """Sum the values that have the sign of their coordinate's sum: elect, then disjoint merge.

    Args:
        trimmed: ``(2, ...)``, accumulated and incoming vector after trimming.
        majority: sign that coordinates with a sum of 0 take.

    Example:
        >>> elect_and_sum(torch.tensor([[1.0, -3.0, 0.0], [2.0, 1.0, 0.0]]), 1.0).tolist()
        [3.0, -3.0, 0.0]
    """
    sign = trimmed.sum(0).sign_()
    sign = (sign + majority).addcmul_(sign.square(), torch.as_tensor(majority).to(sign), value=-1)
    rising, falling = trimmed.clamp(min=0).sum(0), trimmed.clamp(max=0).sum(0)
    return rising.mul_(sign.clamp(min=0)).addcmul_(falling, sign.clamp_(max=0), value=-1)


def _trim(vector: Tensor, threshold: float) -> Tensor:
    """Keep entries from the threshold on; ``hardshrink`` takes a fraction of the time of ``where``, but is strict."""
    limit, down = np.array([threshold, -1.0], _FLOATS[vector.dtype])  # with a plain -1 NumPy 1 goes over to float64
    return functional.hardshrink(vector, float(np.nextafter(limit, down)))
