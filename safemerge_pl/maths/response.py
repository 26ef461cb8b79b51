"""How strongly pretrained matrices read an update: the measure that the response bound limits."""

import torch
from torch import Tensor

__all__ = ["bounded_scale", "read_energy"]

_STEPS = 2**20
"""Scales are multiples of one over this, so that a last bit of a sum does not show in every weight."""


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
    return int(_STEPS * max_response / response) / _STEPS
