"""SAFE-Share: risk-aware masking, and a running mean in the directions that the stream shares. Closed form; ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from safemerge_pl.maths.linalg import right_singular_basis
from safemerge_pl.maths.masking import keep_mask, risk_score
from safemerge_pl.methods.base import MergeMethod, Stack, StackResult, energies, share_of

__all__ = ["SafeShare"]


@dataclass
class SafeShare(MergeMethod):
    r"""Add what is new in a task, average what all tasks share.

    Task vectors of one pretrained model have leading directions in common. A sum counts these once per task, so the
    accumulated vector grows with the stream and overwrites general knowledge. Here the masked task vector
    :math:`T = M \odot \tau` is added outside of the directions :math:`V` that the accumulated vector :math:`a` already
    uses, and inside of them the running mean over the :math:`t` tasks so far is kept:

    .. math:: a \leftarrow a + T\,(I - V V^\top) + \tfrac{1}{t}\,(T - a)\,V V^\top

    The mask keeps the entries that the pretrained matrix reads least (Eqs. 4 and 7 of the paper, general risk alone).
    Nothing is optimised. The merger's ``max_response`` bounds how far the result may move the model
    (:class:`~safemerge_pl.merger.ContinualMerger`).

    Args:
        keep_ratio: :math:`\rho`, share of every layer's entries that is merged, in ``[0, 1]``.
        scoring_rank: leading directions of the pretrained matrix that count as general knowledge. A value below 1 is a
            share of the matrix's width; 128 is a sixth of ViT-B/32's.
        shared_rank: leading directions of the accumulated vector in which the mean is kept. A value below 1 is a share
            of the width; 192 is a quarter of ViT-B/32's, 0 adds everything.
        use_mask: ``False`` merges every entry (ablation).

    Raises:
        ValueError: if a value is out of range; in :meth:`check_layers`, if a rank is above the width of a matrix.

    Example:
        >>> zero = torch.zeros(1, 2, 2)
        >>> method = SafeShare(use_mask=False, scoring_rank=1, shared_rank=1)
        >>> first, second = torch.diag(torch.tensor([4.0, 0.0]))[None], torch.diag(torch.tensor([2.0, 3.0]))[None]
        >>> method.fold_stack(Stack(("vision.0.q",), 2, zero, first, second)).merged.tolist()  # mean of 4 and 2; plus 3
        [[[3.0, 0.0], [0.0, 3.0]]]
    """

    label: ClassVar[str] = "SAFE-Share"
    concurrent: ClassVar[bool] = True
    max_response: ClassVar[float | None] = 0.035

    keep_ratio: float = 0.5
    scoring_rank: float = 128
    shared_rank: float = 192
    use_mask: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.keep_ratio <= 1.0:
            raise ValueError(f"`keep_ratio` must be in [0, 1], got {self.keep_ratio}.")
        for name, least in (("scoring_rank", 1), ("shared_rank", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not (0 < value < 1 or (least <= value < 2**31 and value == int(value))):
                raise ValueError(
                    f"`{name}` must be a whole number of at least {least} or a share of the width below 1, got {value}."
                )

    def check_layers(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse ranks above the width of a matrix.

        Raises:
            ValueError: naming the rank and the first such matrix.
        """
        for layer, (_, width) in shapes.items():
            self._ranks(layer, width)

    def fold_stack(self, stack: Stack) -> StackResult:
        """Mask and share one stack; layers that the task leaves alone stay as they are and do not count."""
        scoring, shared = self._ranks(stack.layers[0], stack.pretrained.shape[2])
        tau, accumulated = stack.task_vector, stack.merged_vector
        mask = self._mask(stack, scoring)
        update = torch.where(mask, tau, 0.0)
        taken = share_of(energies(update), energies(tau))
        if shared and stack.index > 1:
            basis = right_singular_basis(accumulated, shared)
            update = update + (((update - accumulated) / stack.task_counts - update) @ basis) @ basis.mT
        kept = mask.sum((1, 2)) / mask[0].numel()
        if not kept.all():  # at least one entry is kept unless scores are NaN or all infinite
            raise ArithmeticError("the risk scores are not finite; the task vector is too large")
        changed = tau.flatten(1).any(1)[:, None, None]
        return StackResult(torch.where(changed & (update != 0), stack.merged + update, stack.merged), kept, taken=taken)

    def _ranks(self, layer: str, width: int) -> tuple[int, int]:
        """The scoring and the shared rank for a matrix of ``width`` input directions."""
        return _rank("scoring_rank", self.scoring_rank, width, layer), _rank(
            "shared_rank", self.shared_rank, width, layer
        )

    def _mask(self, stack: Stack, rank: int) -> Tensor:
        """Mask the entries that are merged, ``(L, d_out, d_in)``."""
        if not self.use_mask:
            return torch.ones_like(stack.task_vector, dtype=torch.bool)
        key = f"general_basis/{rank}"
        if key not in stack.cache:
            stack.cache[key] = right_singular_basis(stack.pretrained, rank)
        return keep_mask(risk_score(stack.task_vector, stack.cache[key], None, utility_weight=0), self.keep_ratio)


def _rank(name: str, value: float, width: int, layer: str) -> int:
    """Turn a number of directions or a share of the width into a number of directions."""
    rank = max(1, round(value * width)) if 0 < value < 1 else int(value)
    if rank > width:
        raise ValueError(
            f"`{name}` is {rank}, but {layer} has only {width} input directions; give a share of the width, such as "
            "0.25, or a smaller number."
        )
    return rank
