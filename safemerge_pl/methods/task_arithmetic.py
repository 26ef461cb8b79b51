"""Task Arithmetic (Ilharco et al. 2023), accumulated task after task (docs/methods.md, Task Arithmetic)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from safemerge_pl.methods.base import MergeMethod, Scope, Stack, StackResult
from safemerge_pl.runtime.cores import flat_parts

__all__ = ["NaiveAccumulation", "TaskArithmetic"]


@dataclass
class TaskArithmetic(MergeMethod):
    r"""Add every task vector times a factor: :math:`\theta_t = \theta_{t-1} + s\,\tau_t`, all parameters.

    Args:
        scaling: :math:`s`; the paper uses 0.3 for 8 tasks, 0.1 for 14 and 20. A list gives one factor per task, in
            their order, and its last one to all that come after.

    Raises:
        ValueError: if a factor is not finite, or a list is empty.

    Example:
        >>> import torch
        >>> zero = torch.zeros(1, 1, 1)
        >>> TaskArithmetic(scaling=0.5).fold_stack(Stack(("x",), 1, zero, zero + 1, zero + 4)).merged.item()
        3.0
    """

    label: ClassVar[str] = "Task Arithmetic"
    concurrent: ClassVar[bool] = True
    scope: ClassVar[Scope] = "none"
    merges_rest: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    scaling: float | list[float] = 0.3

    def __post_init__(self) -> None:
        if isinstance(self.scaling, tuple):
            self.scaling = list(self.scaling)  # as a saved merge gives it back
        if not self._factors or not all(map(math.isfinite, self._factors)):
            raise ValueError(f"`scaling` must be a finite number or a list of them, got {self.scaling}.")

    @property
    def _factors(self) -> list[float]:
        return self.scaling if isinstance(self.scaling, list) else [self.scaling]

    def fold_stack(self, stack: Stack) -> StackResult:
        """Add the scaled task vector, part by part: what lies between two steps stays in the cache."""
        factor = self._factors[min(stack.index, len(self._factors)) - 1]
        merged = torch.empty_like(stack.merged, memory_format=torch.contiguous_format)
        tensors = (merged, stack.pretrained, stack.merged, stack.incoming)
        for out, base, so_far, incoming in zip(*map(flat_parts, tensors), strict=True):
            torch.sub(incoming, base, out=out).mul_(factor).add_(so_far)
        return StackResult(merged)

    fold_rest = fold_stack


@dataclass
class NaiveAccumulation(TaskArithmetic):
    """Add whole task vectors to the selected layers: the paper's ablation without mask and recovery (Table 3)."""

    label: ClassVar[str] = "Naive accumulation"
    scope: ClassVar[Scope] = "selected"
    merges_rest: ClassVar[bool] = False

    scaling: float | list[float] = 1.0
