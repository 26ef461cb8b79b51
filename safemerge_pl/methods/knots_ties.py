"""KnOTS-TIES (Stoica et al. 2025) in its continual form (docs/methods.md, KnOTS-TIES)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from safemerge_pl.maths.linalg import thin_svd
from safemerge_pl.methods.base import MergeMethod, Scope, Stack, StackResult, require_numbers
from safemerge_pl.methods.ties import elect_and_sum

__all__ = ["KnOTSTies"]


@dataclass
class KnOTSTies(MergeMethod):
    r"""Ties-Merging in the common output basis of both vectors, layer by layer.

    The SVD of :math:`[\bar\tau \mid \tau] = U\,\mathrm{diag}(S)\,[V_1 \mid V_2]` aligns them; TIES merges :math:`V_1`
    and :math:`V_2`, and :math:`\theta_t = \theta_{t-1} + s\,U\,\mathrm{diag}(S)\,V_{ties}`. Acts on every linear layer;
    all other tensors stay pretrained. The first task is added with the same factor.

    Args:
        scaling: :math:`s`; the paper uses 0.3 for 8 tasks, 0.1 for 14 and 20.
        top_k: share of entries that each block keeps, in ``(0, 1]``.
        scale_before_ties: let TIES see :math:`\mathrm{diag}(S)V` as the original does, instead of :math:`V`.
        min_singular_value: components up to this size are dropped.

    Raises:
        ValueError: if ``top_k`` is out of range.
    """

    label: ClassVar[str] = "KnOTS-TIES"
    concurrent: ClassVar[bool] = True
    scope: ClassVar[Scope] = "linear"

    scaling: float = 0.3
    top_k: float = 0.2
    scale_before_ties: bool = False
    min_singular_value: float = 1e-4

    def __post_init__(self) -> None:
        if not 0.0 < self.top_k <= 1.0:
            raise ValueError(f"`top_k` must be in (0, 1], got {self.top_k}.")
        require_numbers(self, finite=("scaling", "top_k", "min_singular_value"))

    def fold_stack(self, stack: Stack) -> StackResult:
        """Merge one stack, one layer at a time: the layers keep different numbers of components."""
        if stack.index == 1:
            return StackResult(stack.merged + self.scaling * stack.task_vector)
        updates = [self._merge(old, new) for old, new in zip(stack.merged_vector, stack.task_vector, strict=True)]
        return StackResult(stack.merged + self.scaling * torch.stack(updates))

    def _merge(self, old: Tensor, new: Tensor) -> Tensor:
        """Merge the vectors of one layer, ``(d_out, d_in)``."""
        u, s, v = (part[0] for part in thin_svd(torch.cat([old, new], dim=1)[None]))
        real = s > self.min_singular_value
        if not real.any():
            return torch.zeros_like(new)
        u, s, rows = u[:, real], s[real], v[:, real].mT.to(new.dtype)  # rows: (r, 2 d_in)
        blocks = torch.stack(rows.chunk(2, dim=1))  # (2, r, d_in)
        if self.scale_before_ties:
            blocks = blocks * s[:, None].to(new.dtype)
        place = blocks[0].numel() - int(blocks[0].numel() * self.top_k)
        limits = blocks.abs().flatten(1).kthvalue(max(place, 1), dim=1).values
        trimmed = torch.where(blocks.abs() >= limits[:, None, None], blocks, 0.0)
        majority = trimmed.sum(0).sign().sum().sign()
        merged = elect_and_sum(trimmed, majority)
        left = u if self.scale_before_ties else u * s
        return left.to(new.dtype) @ merged
