"""The response bound: how strongly the pretrained model reads what was merged, and how much of it is deployed."""

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from safemerge_pl.architectures.layers import MergeLayer
from safemerge_pl.errors import CheckpointError
from safemerge_pl.folding.processes import Processes
from safemerge_pl.folding.stacks import MAX_CORE_ENTRIES
from safemerge_pl.maths.response import read_energy
from safemerge_pl.methods.base import MergeMethod
from safemerge_pl.runtime.cores import map_on_cores

__all__ = [
    "Gauge",
    "MaxDrift",
    "MaxResponse",
    "bound_settings",
    "choose_bound",
    "measure_response",
    "name_with_bound",
    "require_drift_bound",
    "require_one_process",
    "require_response_bound",
    "scale_vector",
]

Gauge = Callable[[Mapping[str, Tensor]], float]
"""Measures how far a model has moved with merged parameters, by name, in the place of the pretrained ones."""

MaxResponse = float | Literal["auto"] | None
"""A bound, ``"auto"`` for the method's own, ``None`` for no bound."""

MaxDrift = float | Literal["auto"] | None
"""A bound on the drift, ``"auto"`` for that of an earlier merge, ``None`` for no bound."""


def choose_bound(method: MergeMethod, max_response: MaxResponse) -> float | None:
    """The bound that holds for a merge.

    Raises:
        ValueError: unless it is a finite number above 0, ``"auto"`` or ``None``.

    Example:
        >>> from safemerge_pl.methods import SafeMerge, SafeShare
        >>> choose_bound(SafeShare(), "auto"), choose_bound(SafeMerge(), "auto"), choose_bound(SafeMerge(), 0.05)
        (0.035, None, 0.05)
    """
    if max_response == "auto":
        return method.max_response
    if max_response is None:
        return None
    require_response_bound(max_response)
    return float(max_response)


def require_response_bound(max_response: float | None) -> None:
    """Refuse a bound on the response that is none.

    Raises:
        ValueError: unless it is a finite number above 0, or ``None``.

    Example:
        >>> require_response_bound(0.035)
        >>> require_response_bound(0)
        Traceback (most recent call last):
        ...
        ValueError: `max_response` must be a finite number above 0, or None for no bound, got 0.
    """
    number = isinstance(max_response, int | float) and not isinstance(max_response, bool)
    if max_response is not None and (not number or not 0 < max_response < math.inf):
        raise ValueError(f"`max_response` must be a finite number above 0, or None for no bound, got {max_response!r}.")


def require_drift_bound(max_drift: float | None) -> None:
    """Refuse a bound on the drift that is none.

    Raises:
        ValueError: unless it is a number above 0 and below 2, or ``None``.

    Example:
        >>> require_drift_bound(0.01)
        >>> require_drift_bound(2)
        Traceback (most recent call last):
        ...
        ValueError: `max_drift` must be a number above 0 and below 2, or None for no bound, got 2.
    """
    number = isinstance(max_drift, int | float) and not isinstance(max_drift, bool)
    if max_drift is not None and (not number or not 0 < max_drift < 2):
        raise ValueError(f"`max_drift` must be a number above 0 and below 2, or None for no bound, got {max_drift!r}.")


def require_one_process(count: int) -> None:
    """Refuse a bound on the drift over several processes, none of which has the whole merge to run.

    Args:
        count: processes that fold together.

    Raises:
        CheckpointError: if there are several.
    """
    if count > 1:
        raise CheckpointError("`max_drift` holds on one process only; use one, or bound by `max_response`.")


def bound_settings(max_response: float | None, max_drift: float | None) -> dict[str, float]:
    """The bounds that hold, by name.

    Example:
        >>> bound_settings(0.035, None)
        {'max_response': 0.035}
    """
    bounds = {"max_response": max_response, "max_drift": max_drift}
    return {name: bound for name, bound in bounds.items() if bound is not None}


def name_with_bound(method: MergeMethod, bound: float | None, max_drift: float | None = None) -> str:
    """Name a method in tables and figures, with its bounds where there are any.

    Example:
        >>> from safemerge_pl.methods import SafeShare
        >>> name_with_bound(SafeShare(), 0.035), name_with_bound(SafeShare(), None)
        ('SAFE-Share, bound 0.035', 'SAFE-Share')
        >>> name_with_bound(SafeShare(), None, 0.01)
        'SAFE-Share, drift at most 1 %'
    """
    name = method.label if bound is None else f"{method.label}, bound {bound:g}"
    return name if max_drift is None else f"{name}, drift at most {100 * max_drift:g} %"


def measure_response(
    matrices: Sequence[MergeLayer],
    biases: Sequence[MergeLayer],
    pretrained: Callable[[str], Tensor],
    merged: Callable[[str], Tensor],
    *,
    device: torch.device,
    processes: Processes,
    owners: Mapping[str, int],
    own: MutableMapping[str, float],
) -> float:
    r"""The response of the accumulated vector: of all merged matrices together, or of all biases, if that is larger.

    .. math:: \mathrm{response}(a) = \max\left(
        \sqrt{\frac{\sum_l \|a_l W_{0,l}^\top\|_F^2}{\sum_l \|W_{0,l} W_{0,l}^\top\|_F^2}},
        \sqrt{\frac{\sum_l \|a_l\|^2}{\sum_l \|b_{0,l}\|^2}}\right)

    What the pretrained matrices read of the update, against what they read of themselves. It needs no data: rows of a
    trained matrix lie along the inputs that it was trained on. The input of a bias is 1.

    Args:
        matrices: what is merged and multiplied with.
        biases: what is merged and added.
        pretrained: gives a parameter of the pretrained model.
        merged: gives a parameter with the unscaled accumulated vector in it, float32.
        device: where the arithmetic runs.
        processes: among which the matrices are shared out.
        owners: rank of the process that has each parameter.
        own: the denominators that are known, by layer; filled here.

    Returns:
        At least 0; 0 where the pretrained parameters are all zero or nothing was merged.

    Raises:
        PeerError: if it fails on another process.
    """

    def measure(layer: MergeLayer) -> tuple[float, float]:
        base = layer.view(pretrained(layer.parameter)).to(device).float()[None]
        update = layer.view(merged(layer.parameter)).to(device)[None] - base
        if layer.name not in own:
            own[layer.name] = read_energy(base, base).item()
        return read_energy(update, base).item(), own[layer.name]

    def measure_own() -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        mine, added = (
            [layer for layer in layers if owners[layer.parameter] == processes.rank] for layers in (matrices, biases)
        )
        small = [layer for layer in mine if layer.entries <= MAX_CORE_ENTRIES and device.type == "cpu"]
        found = dict(zip((layer.name for layer in small), map_on_cores(measure, small), strict=True))
        found |= {layer.name: measure(layer) for layer in mine if layer.name not in found}
        return list(found.values()), [_measure_bias(pretrained(e.parameter), merged(e.parameter)) for e in added]

    shares = zip(*processes.share(measure_own), strict=True)
    return max(_ratio([pair for share in kind for pair in share]) for kind in shares)


def _measure_bias(pretrained: Tensor, merged: Tensor) -> tuple[float, float]:
    """Squared lengths of a bias's change and of the pretrained bias."""
    base = pretrained.double()
    return (merged.double() - base).square().sum().item(), base.square().sum().item()


def _ratio(energies: Sequence[tuple[float, float]]) -> float:
    """Root of the one sum over the other; 0 where there is nothing."""
    read, total = (math.fsum(column) for column in zip(*energies, strict=True)) if energies else (0.0, 0.0)
    return math.sqrt(read / total) if total else 0.0


def scale_vector(pretrained: Tensor, merged: Tensor, scale: float) -> Tensor:
    """Pretrained weights with a part of the accumulated vector; the merged tensor itself where all of it is taken.

    Example:
        >>> scale_vector(torch.tensor([1.0]), torch.tensor([3.0]), 0.5).tolist()
        [2.0]
    """
    if scale == 1.0:
        return merged
    base = pretrained.float()
    return base + scale * (merged - base)
