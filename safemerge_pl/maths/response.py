"""How strongly pretrained matrices read an update, and how much of it the bounds on response and drift deploy."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["bounded_scale", "limit_drift", "read_energy"]

_STEPS = 2**20
"""Scales are multiples of one over this, so that a last bit of a sum does not show in every weight."""

_TRIALS = 20
"""Factors that :func:`limit_drift` tries at most."""


def read_energy(update: Tensor, pretrained: Tensor) -> Tensor:
    r"""Compute the energy of what a pretrained matrix reads of an update, :math:`\|a W_0^\top\|_F^2`, matrix by matrix.

    Rows of a weight matrix are directions of its input. An update whose rows lie along the rows of the pretrained
    matrix changes what the model reads most strongly; one that is orthogonal to all of them changes nothing that the
    pretrained matrix looks at. With :math:`G = W_0^\top W_0` it is :math:`\mathrm{tr}(a G a^\top)`, which is the
    cheaper form where a matrix is taller than wide.

    Args:
        update: :math:`a`, ``(L, d_out, d_in)``.
        pretrained: :math:`W_0`, ``(L, d_out, d_in)``.

    Returns:
        ``(L,)`` float64, at least 0.

    Example:
        >>> w0 = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]])
        >>> read_energy(torch.tensor([[[3.0, 4.0], [0.0, 0.0]]]), w0).tolist()  # it reads 3 * 2 and nothing of the 4
        [36.0]
    """
    if pretrained.shape[1] > pretrained.shape[2]:
        return ((update @ (pretrained.mT @ pretrained)) * update).sum((1, 2), dtype=torch.float64).clamp_(min=0)
    return (update @ pretrained.mT).square_().sum((1, 2), dtype=torch.float64)


def bounded_scale(response: float, max_response: float | None) -> float:
    r"""Compute the factor :math:`s = \min(1, \mathrm{max\_response} / \mathrm{response})` of the accumulated vector.

    It is rounded down to a multiple of :math:`2^{-20}`: the bound holds, and sums that differ in their last bits give
    one scale.

    Args:
        response: of the unscaled accumulated vector.
        max_response: the bound; ``None`` bounds nothing.

    Example:
        >>> bounded_scale(0.07, 0.035), bounded_scale(0.02, 0.035), bounded_scale(0.02, None)
        (0.5, 1.0, 1.0)
    """
    if max_response is None or response <= max_response:
        return 1.0
    return _round_down(max_response / response)


def limit_drift(drift_at: Callable[[float], float], max_drift: float, scale: float) -> tuple[float, float]:
    """Find a factor of the accumulated vector with which the model drifts no further than asked.

    Drift grows about with the square of the factor, at first; from then on with the power that it had between the last
    two trials. So few trials are needed.

    Args:
        drift_at: measures the drift at a factor; 0 at 0.
        max_drift: above 0.
        scale: the largest factor, in [0, 1].

    Returns:
        A factor, a multiple of :math:`2^{-20}`, and its drift, which is at most ``max_drift`` and more than nine tenths
        of it if the factor is below ``scale`` and drift does not jump.

    Raises:
        ArithmeticError: if a drift is NaN.

    Example:
        >>> factor, drift = limit_drift(lambda factor: 0.5 * factor**2, 0.02, 1.0)
        >>> round(factor, 2), 0.018 < drift <= 0.02
        (0.2, True)
    """
    low, reached, high, beyond, power = 0.0, 0.0, scale, drift_at(scale), 2.0
    if beyond <= max_drift:
        return scale, beyond
    for _ in range(_TRIALS):
        if math.isnan(beyond):
            raise ArithmeticError("the features of noise are not finite: the merged model is broken")
        trial = _round_down(high * (0.96 * max_drift / beyond) ** (1 / power))
        if not low < trial < high:
            trial = _round_down((low + high) / 2)
        if trial in (low, high):  # nothing lies between
            break
        drift = drift_at(trial)
        if drift and drift != beyond:
            power = max(0.1, math.log(beyond / drift) / math.log(high / trial))
        if drift <= max_drift:
            low, reached = trial, drift
            if drift > 0.9 * max_drift:
                break
        else:
            high, beyond = trial, drift
    return low, reached


def _round_down(scale: float) -> float:
    return int(_STEPS * scale) / _STEPS
