"""How much of an incoming model lies where the pretrained model reads most: a sign of how it was trained."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from safemerge_pl.architectures.groups import FEED_IN, group_of
from safemerge_pl.architectures.layers import MergeLayer, parts_of
from safemerge_pl.checkpoints.tensors import Checkpoint
from safemerge_pl.folding.rounding import unrounded

__all__ = ["QUICKLY_DECOMPOSED", "LeadingDirections", "leading_basis", "share_inside", "standing_out"]

QUICKLY_DECOMPOSED = 1024
"""Width up to which the leading directions take a fraction of a second."""

_LOOKED_AT = 4
"""Matrices that are looked at, spread over the depth: as telling as all on a model of six blocks."""

_SHARE = 6
"""A sixth of the input directions are the leading ones, as in the paper (128 of 768)."""

_STEPS = 3
"""Of the subspace iteration."""

_EARLIER = 3
"""Earlier models that it takes to know what is usual."""

_USUAL = 7 / 8
"""Share of the earlier models' median below which a model stands out."""


class LeadingDirections:
    r"""The leading input directions of a few pretrained matrices.

    .. math:: \mathrm{leading}(\tau) = \frac{\sum_l \|\tau_l Q_l\|_F^2}{\sum_l \|\tau_l\|_F^2}

    with the leading sixth :math:`Q_l` of the right singular vectors of the pretrained matrix, over four matrices on the
    input side of the feed-forward, spread over the depth. Of the definitions that were tried this one separates best
    (docs/folding.md).

    Args:
        parameters: names of what is merged.
        pretrained: the model.

    Attributes:
        layers: the matrices that are looked at, by parameter; none if no feed-forward is merged.

    Example:
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> name, weight, change = "layers.0.mlp.up_proj.weight", torch.zeros(2, 6), torch.zeros(2, 6)
        >>> weight[0, 0] = 2.0
        >>> change[:, :2] = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
        >>> leading = LeadingDirections([name], Memory({name: weight}, "a mapping"))
        >>> round(leading.share({name: weight + change}), 3)  # 1 of 1 + 9
        0.1
    """

    def __init__(self, parameters: Iterable[str], pretrained: Checkpoint) -> None:
        shapes = pretrained.shapes()
        names = dict.fromkeys(name for name in parameters if group_of(name) == FEED_IN and len(shapes[name]) == 2)
        found = [_upright(name, shapes) for name in names]
        last, count = len(found) - 1, min(_LOOKED_AT, len(found))
        looked_at = (found[round(place * last / max(count - 1, 1))] for place in range(count))
        self.layers = {layer.parameter: layer for layer in looked_at}
        self._pretrained = pretrained
        self._bases: dict[str, Tensor] = {}  # of a few matrices, for as long as the stream lasts

    @property
    def width(self) -> int:
        """Input directions of the widest of the matrices."""
        return max((layer.shape[1] for layer in self.layers.values()), default=0)

    def share(self, incoming: Mapping[str, Tensor]) -> float | None:
        """The share of an incoming model's change that lies there; ``None`` where there is no change to look at.

        Args:
            incoming: its tensors, by the pretrained model's names.
        """
        pairs = []
        for name, part in self.layers.items():
            base = self._pretrained[name].detach()
            new = unrounded(base, incoming[name].detach().to(base.device))[0]
            pairs.append(self.inside(part, base, new.float() - base.float()))
        return share_inside(pairs)

    def part_of(self, layer: MergeLayer) -> MergeLayer | None:
        """What is looked at of a layer that is merged; ``None`` if nothing is."""
        looked_at = self.layers.get(layer.parameter)
        if looked_at is None:
            return None
        if layer.name == looked_at.name:  # cut out and upright already
            return MergeLayer(looked_at.name, looked_at.parameter, looked_at.shape)
        whole = layer.rows is None and not layer.transposed
        return looked_at if whole else None

    def inside(self, part: MergeLayer, pretrained: Tensor, change: Tensor) -> tuple[float, float]:
        """Squared length of a change in the leading directions, and of all of it; on any thread.

        Args:
            part: from :meth:`part_of`.
            pretrained: the layer's pretrained weights, ``(d_out, d_in)`` as they are stored.
            change: the incoming less those, of the same shape.
        """
        base, tau = part.view(pretrained).float(), part.view(change).float()
        if part.name not in self._bases:
            self._bases[part.name] = leading_basis(base, max(1, base.shape[1] // _SHARE))
        basis = self._bases[part.name].to(tau.device)
        lengths = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in (tau @ basis, tau)]
        inside, whole = torch.stack(lengths).square().tolist()
        return inside, whole


def leading_basis(matrix: Tensor, rank: int) -> Tensor:
    """Approximate the leading right singular vectors by three steps of subspace iteration.

    It is the randomised subspace iteration of Halko, Martinsson and Tropp (2011, Algorithm 4.4), whose random start
    comes from a generator of its own, so the result is the same each time. To measure a share of energy it is accurate
    enough, and takes a fraction of the time of a decomposition.

    Args:
        matrix: ``(d_out, d_in)``, float32.
        rank: number of directions.

    Returns:
        ``(d_in, rank)`` with orthonormal columns.

    Example:
        >>> leading_basis(torch.diag(torch.tensor([1.0, 50.0, 2.0])), 1).abs().round().flatten().tolist()
        [0.0, 1.0, 0.0]
    """
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(matrix.shape[1], rank, generator=generator, device="cpu", dtype=torch.float32)
    basis: Tensor = start.to(matrix.device)
    for _ in range(_STEPS):
        basis = torch.linalg.qr(matrix.T @ (matrix @ basis)).Q
    return basis


def share_inside(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Share of all matrices together, from the energy inside and the whole energy of each.

    Args:
        pairs: one per matrix, as :meth:`LeadingDirections.inside` gives them.

    Returns:
        A number in [0, 1]; ``None`` where there is no change, or one that is not finite.

    Example:
        >>> share_inside([(0.5, 1.0), (0.5, 3.0)]), share_inside([])
        (0.25, None)
    """
    inside, whole = (math.fsum(column) for column in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    return inside / whole if 0 < whole < math.inf else None


def _upright(name: str, shapes: Mapping[str, tuple[int, ...]]) -> MergeLayer:
    """A matrix as it multiplies, the first part of a fused one."""
    try:
        parts = parts_of(name, shapes)
    except ValueError:
        parts = []
    return parts[0] if parts else MergeLayer(name, name, shapes[name])


def standing_out(share: float | None, earlier: Sequence[float | None]) -> str | None:
    """Describe a model whose change lies elsewhere than that of the earlier ones; ``None`` for a usual one.

    Args:
        share: of the change in the pretrained model's leading directions; ``None`` if it says nothing.
        earlier: those of the models before it in the stream.

    Example:
        >>> standing_out(0.34, [0.41, 0.43, 0.42])[:51]
        'only 34% of its change lies in the leading directio'
        >>> standing_out(0.39, [0.41, 0.43, 0.42]), standing_out(0.34, [0.41, 0.43])
        (None, None)
    """
    known = [value for value in earlier if value is not None]
    if share is None or len(known) < _EARLIER or share >= _USUAL * statistics.median(known):
        return None
    return (
        f"only {share:.0%} of its change lies in the leading directions of the pretrained model, {min(known):.0%} to "
        f"{max(known):.0%} of the earlier models': it may have forgotten much else in its training and cost the merge "
        "general knowledge; bound what is deployed (`max_response`), train it shorter, or leave it out"
    )
