"""Bounds on what a merge may do to the pretrained model: which hold, and which are none."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from safemerge_pl.errors import CheckpointError
from safemerge_pl.methods.base import MergeMethod

__all__ = [
    "Gauge",
    "MaxDrift",
    "MaxResponse",
    "bound_settings",
    "choose_bound",
    "name_with_bound",
    "require_drift_bound",
    "require_one_process",
    "require_response_bound",
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
