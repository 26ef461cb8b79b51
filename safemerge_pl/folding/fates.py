"""What a fold takes of a task vector and what it leaves, as shares of its squared length, by group of tensors."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from safemerge_pl.architectures.groups import FATES, GROUPS, add_fates, group_of
from safemerge_pl.folding.rounding import unrounded
from safemerge_pl.runtime.cores import flat_parts, length_of

__all__ = ["GroupShares", "Taken", "add_up", "in_words", "left_energy", "total"]


@dataclass(frozen=True)
class GroupShares:
    r"""What became of one group of tensors: parts of the squared length of the **whole** task vector.

    The task vector :math:`\tau` is the incoming less the pretrained model, over every floating-point tensor that both
    have; :math:`E = \|\tau\|^2`. All four shares of all groups are in [0, 1] and add up to 1:

    - merged: :math:`\|T\|^2 / E`, what the method takes. With a mask :math:`T = M \odot \tau`; where a method filters
      directions out, what passes; else :math:`T = \tau`. A factor that a method scales with does not count.
    - recovered: of what is not taken, :math:`D = \tau - T`, what the correction :math:`C` makes up for in the task's
      leading directions :math:`V`: :math:`\max(0, \|DV\|^2 - \|(D - C)V\|^2) / E`.
    - masked: the rest of it, :math:`\|D\|^2 / E` less what is recovered.
    - pretrained: :math:`\|\tau\|^2 / E` of the tensors that are not merged at all.

    Attributes:
        group: one of :data:`~safemerge_pl.architectures.groups.GROUPS`.
        merged: see above.
        masked: see above.
        recovered: see above.
        pretrained: see above.
    """

    group: str
    merged: float = 0.0
    masked: float = 0.0
    recovered: float = 0.0
    pretrained: float = 0.0

    @property
    def whole(self) -> float:
        """The group's share of the squared task vector."""
        return self.merged + self.masked + self.recovered + self.pretrained


@dataclass(frozen=True)
class Taken:
    """One merged layer: its part of the squared task vector, and which shares of that are taken and recovered."""

    parameter: str
    energy: float
    merged: float
    recovered: float


def add_up(taken: Iterable[Taken], left: Mapping[str, float]) -> tuple[GroupShares, ...]:
    """Shares by group; none where nothing was changed.

    Args:
        taken: one per merged layer.
        left: squared length of the change of each tensor that is not merged, by its name; what is not finite is
            passed over.

    Example:
        >>> kept = Taken("h.0.attn.c_attn.weight", energy=3.0, merged=0.5, recovered=0.25)
        >>> for shares in add_up([kept], {"lm_head.weight": 1.0}):
        ...     print(shares)
        GroupShares(group='attention in', merged=0.375, masked=0.1875, recovered=0.1875, pretrained=0.0)
        GroupShares(group='head', merged=0.0, masked=0.0, recovered=0.0, pretrained=0.25)
    """
    found = {group: dict.fromkeys(FATES, 0.0) for group in GROUPS}
    for layer in taken:
        sums = found[group_of(layer.parameter)]
        recovered = min(layer.recovered, 1 - layer.merged)
        sums["merged"] += layer.energy * layer.merged
        sums["recovered"] += layer.energy * recovered
        sums["masked"] += layer.energy * (1 - layer.merged - recovered)
    for name, energy in left.items():
        found[group_of(name)]["pretrained"] += energy if math.isfinite(energy) else 0.0
    whole = math.fsum(value for sums in found.values() for value in sums.values())
    if not whole:
        return ()
    shares = (GroupShares(group, *(sums[fate] / whole for fate in FATES)) for group, sums in found.items())
    return tuple(group for group in shares if group.whole)


def total(shares: Sequence[GroupShares]) -> GroupShares:
    """All groups together.

    Example:
        >>> total([GroupShares("head", pretrained=0.25), GroupShares("other", merged=0.75)])
        GroupShares(group='all', merged=0.75, masked=0.0, recovered=0.0, pretrained=0.25)
    """
    return GroupShares("all", **add_fates(map(vars, shares)))


def in_words(shares: Sequence[GroupShares]) -> str:
    """One sentence; empty where nothing is known.

    Example:
        >>> in_words([GroupShares("head", pretrained=0.25), GroupShares("other", merged=0.75)])
        '75% of the squared task vector merged, 25% left pretrained (head 25%)'
    """
    if not shares:
        return ""
    whole = total(shares)
    parts = [
        f"{_percent(getattr(whole, fate))}{' of the squared task vector' if fate == 'merged' else ''} {words}"
        for fate, words in FATES.items()
        if fate == "merged" or getattr(whole, fate) >= 0.0005
    ]
    left = sorted((group for group in shares if group.pretrained >= 0.0005), key=lambda group: -group.pretrained)
    named = f" ({', '.join(f'{group.group} {_percent(group.pretrained)}' for group in left)})" if left else ""
    return ", ".join(parts) + named


def left_energy(base: Tensor, new: Tensor) -> float:
    """Compute the squared length of the change of a tensor that is not merged; rounding is no change.

    Args:
        base: pretrained, of any shape.
        new: incoming, of the same shape.

    Example:
        >>> import torch
        >>> left_energy(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        4.0
    """
    parts = zip(flat_parts(base.detach()), flat_parts(new.detach()), strict=True)
    rounded = ((part, unrounded(part, other.to(part.device))[0]) for part, other in parts)
    return length_of(part.float() - other.float() for part, other in rounded) ** 2


def _percent(share: float) -> str:
    """Whole percent, more where it would be nothing or all.

    Example:
        >>> _percent(0.374), _percent(0.004), _percent(0.9971), _percent(1.0)
        ('37%', '0.4%', '99.7%', '100%')
    """
    percent = 100 * share
    fine = 0 < percent < 1 or 99 < percent < 99.95
    return f"{percent:.1f}%" if fine else f"{percent:.0f}%"
