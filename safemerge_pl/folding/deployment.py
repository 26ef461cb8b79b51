"""How much of the accumulated vector is deployed: the scale that keeps the bounds of a merge."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from safemerge_pl.architectures.layers import MergeLayer
from safemerge_pl.checkpoints.tensors import LazyTensors
from safemerge_pl.errors import CheckpointError
from safemerge_pl.folding.bound import (
    Gauge,
    MaxResponse,
    bound_settings,
    choose_bound,
    require_drift_bound,
    require_one_process,
)
from safemerge_pl.folding.division import Division
from safemerge_pl.folding.stacks import MAX_CORE_ENTRIES
from safemerge_pl.maths.response import bounded_scale, limit_drift, read_energy
from safemerge_pl.methods.base import MergeMethod
from safemerge_pl.runtime.cores import map_on_cores

__all__ = ["Deployment", "deploy"]

_Read = Callable[[str], Tensor]


def deploy(pretrained: Mapping[str, Tensor], read: _Read, scale: float) -> _Read:
    """Give parameters with a part of the accumulated vector, from those with all of it.

    Args:
        pretrained: the pretrained parameters, by name.
        read: gives a parameter with the whole vector, float32.
        scale: the part, in [0, 1].

    Returns:
        What gives a parameter with that part, float32; ``read`` itself where all of it is taken.

    Example:
        >>> import torch
        >>> deploy({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}.__getitem__, 0.5)("w").tolist()
        [2.0]
    """
    if scale == 1.0:
        return read

    def read_part(name: str) -> Tensor:
        base = pretrained[name].float()
        return base + scale * (read(name) - base)

    return read_part


class Deployment:
    r"""Deploys as much of the accumulated vector as the bounds of a merge allow, :math:`\theta_0 + s a`.

    Args:
        method: how is merged; it may have a bound of its own.
        max_response: bound on the response, ``"auto"`` for the method's own.
        max_drift: bound on the drift.
        gauge: measures the drift with given parameters.

    Raises:
        ValueError: if a bound is none, or there is a ``max_drift`` without a ``gauge``.
    """

    def __init__(
        self, method: MergeMethod, max_response: MaxResponse, max_drift: float | None, gauge: Gauge | None
    ) -> None:
        self.max_response = choose_bound(method, max_response)
        require_drift_bound(max_drift)
        if max_drift is not None and gauge is None:
            raise ValueError("`max_drift` needs a `gauge`, as the merger itself runs no model; see `DriftGauge`.")
        self.max_drift, self._gauge = max_drift, gauge
        self._own_energies: dict[str, float] = {}  # of the pretrained matrices, by layer

    def settings(self) -> dict[str, float]:
        """The bounds that hold, by name."""
        return bound_settings(self.max_response, self.max_drift)

    def require_possible(self, division: Division) -> None:
        """Refuse a bound on the drift over several processes.

        Raises:
            CheckpointError: if there are several.
        """
        if self.max_drift is not None:
            require_one_process(division.processes.count)

    def require_same(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on with other bounds than those that a merge was made with.

        Args:
            state: of the saved merge.

        Raises:
            CheckpointError: naming the bound that differs.
        """
        for name, bound in (("max_response", self.max_response), ("max_drift", self.max_drift)):
            if state.get(name) != bound:
                raise CheckpointError(f"the merge was made with `{name}` {state.get(name)}, not {bound}; use the same.")

    def at(self, max_response: float | None, read: _Read, division: Division) -> _Read:
        """Parameters as another bound on the response would deploy them, whatever they drift.

        Args:
            max_response: the other bound.
            read: gives a parameter with the whole accumulated vector.
            division: how the merge is shared out.

        Raises:
            ValueError: if the bound is none.
        """
        bound = choose_bound(division.method, max_response)
        scale = 1.0 if bound is None else bounded_scale(self.respond(read, division), bound)
        return deploy(division.plan.pretrained, read, scale)

    def measure(self, merged: Mapping[str, Tensor], division: Division) -> tuple[float | None, float, float | None]:
        """Find the scale that keeps the bounds.

        Args:
            merged: parameters with the whole accumulated vector.
            division: how the merge is shared out.

        Returns:
            The response of the whole vector, the scale, and the drift at that scale; ``None`` for what is not bounded.

        Raises:
            CheckpointError: if features of noise are not finite.
        """
        if self.max_response is None and self.max_drift is None:
            return None, 1.0, None
        response = self.respond(merged.__getitem__, division)
        scale, gauge = bounded_scale(response, self.max_response), self._gauge
        if self.max_drift is None or gauge is None:
            return response, scale, None

        def drift_at(scale: float) -> float:
            part = deploy(division.plan.pretrained, merged.__getitem__, scale)
            return gauge(LazyTensors(division.plan.parameters, part))

        try:
            return response, *limit_drift(drift_at, self.max_drift, scale)
        except ArithmeticError as error:
            raise CheckpointError(f"the merge cannot be bounded: {error}.") from error

    def respond(self, read: _Read, division: Division) -> float:
        r"""Compute the response of the accumulated vector: of all merged matrices together, or of all biases if larger.

        .. math:: \mathrm{response}(a) = \max\left(
            \sqrt{\frac{\sum_l \|a_l W_{0,l}^\top\|_F^2}{\sum_l \|W_{0,l} W_{0,l}^\top\|_F^2}},
            \sqrt{\frac{\sum_l \|a_l\|^2}{\sum_l \|b_{0,l}\|^2}}\right)

        What the pretrained matrices read of the update, against what they read of themselves. It needs no data: rows
        of a trained matrix lie along the inputs that it was trained on. The input of a bias is 1.

        Args:
            read: gives a parameter with the whole accumulated vector in it, float32.
            division: how the merge is shared out.

        Returns:
            At least 0; 0 where the pretrained parameters are all zero or nothing was merged.

        Raises:
            PeerError: if it fails on another process.
        """
        plan, device, own = division.plan, division.device, self._own_energies

        def measure(layer: MergeLayer) -> tuple[float, float]:
            base = layer.view(plan.pretrained[layer.parameter]).to(device).float()[None]
            update = layer.view(read(layer.parameter)).to(device)[None] - base
            if layer.name not in own:
                own[layer.name] = read_energy(base, base).item()
            return read_energy(update, base).item(), own[layer.name]

        def measure_own() -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
            mine, added = (
                [layer for layer in layers if division.owners[layer.parameter] == division.processes.rank]
                for layers in (plan.matrices, plan.biases)
            )
            small = [layer for layer in mine if layer.entries <= MAX_CORE_ENTRIES and device.type == "cpu"]
            found = dict(zip((layer.name for layer in small), map_on_cores(measure, small), strict=True))
            found |= {layer.name: measure(layer) for layer in mine if layer.name not in found}
            return list(found.values()), [_measure_bias(plan.pretrained[e.parameter], read(e.parameter)) for e in added]

        shares = zip(*division.processes.share(measure_own), strict=True)
        return max(_ratio([pair for share in kind for pair in share]) for kind in shares)


def _measure_bias(pretrained: Tensor, merged: Tensor) -> tuple[float, float]:
    """Squared lengths of a bias's change and of the pretrained bias."""
    base = pretrained.double()
    return (merged.double() - base).square().sum().item(), base.square().sum().item()


def _ratio(energies: Sequence[tuple[float, float]]) -> float:
    """Root of the one sum over the other; 0 where there is nothing."""
    read, total = (math.fsum(column) for column in zip(*energies, strict=True)) if energies else (0.0, 0.0)
    return math.sqrt(read / total) if total else 0.0
