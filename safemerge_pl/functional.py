"""The numbers of a merge stream as pure functions (paper section 5.1, METHODS 12).

``accuracy[i, j]`` is the accuracy on task ``j`` after merge ``i`` (both from 0), in whatever unit the caller uses;
NaN means *not measured*. A value that is undefined is NaN, never 0.
"""

import torch
from torch import Tensor

__all__ = ["average_accuracy", "backward_transfer", "general_average", "h_score"]


def average_accuracy(accuracy: Tensor) -> Tensor:
    r"""ACC: mean accuracy over the tasks merged so far, after the last merge.

    .. math:: \mathrm{ACC} = \frac1T \sum_i a_i(\theta_T)

    Args:
        accuracy: ``(T, T)``, row = merge, column = task.

    Returns:
        Scalar; NaN if an entry of the last row is NaN or there is no task.

    Raises:
        ValueError: if ``accuracy`` is not square.

    Example:
        >>> average_accuracy(torch.tensor([[0.9, torch.nan], [0.7, 0.8]])).item()
        0.75
    """
    _require_square(accuracy)
    return accuracy[-1].mean() if len(accuracy) else accuracy.new_tensor(torch.nan)


def backward_transfer(accuracy: Tensor) -> Tensor:
    r"""BWT: what later merges did to earlier tasks; negative is forgetting.

    .. math:: \mathrm{BWT} = \frac1{T-1} \sum_{i<T} \big[a_i(\theta_T) - a_i(\theta_i)\big]

    Args:
        accuracy: ``(T, T)``, row = merge, column = task.

    Returns:
        Scalar; NaN with fewer than two tasks, for then nothing could be forgotten.

    Raises:
        ValueError: if ``accuracy`` is not square.

    Example:
        >>> backward_transfer(torch.tensor([[0.9, torch.nan], [0.75, 0.8]])).item()  # 0.75 - 0.9
        -0.1499999761581421
    """
    _require_square(accuracy)
    if len(accuracy) < 2:
        return accuracy.new_tensor(torch.nan)
    return (accuracy[-1] - accuracy.diagonal())[:-1].mean()


def general_average(general: Tensor) -> Tensor:
    r"""Gen.: mean accuracy over the held-out control sets.

    .. math:: \mathrm{Gen} = \frac1{|\mathcal G|} \sum_g a_g

    Args:
        general: ``(..., G)``.

    Returns:
        ``(...)``; NaN without control sets.

    Example:
        >>> general_average(torch.tensor([0.5, 0.25])).item()
        0.375
    """
    return general.mean(-1)


def h_score(acc: Tensor, gen: Tensor) -> Tensor:
    r"""H-score: harmonic mean of ACC and Gen.; 0 if either is 0, or below it, as a mean of correlations can be.

    .. math:: H = \frac{2\,\mathrm{ACC}\,\mathrm{Gen}}{\mathrm{ACC} + \mathrm{Gen}}

    Args:
        acc: any shape.
        gen: same shape, same unit.

    Example:
        >>> h_score(torch.tensor([0.5, 0.0]), torch.tensor([0.25, 0.0])).tolist()
        [0.3333333432674408, 0.0]
    """
    total = acc + gen
    return torch.where((acc <= 0) | (gen <= 0), torch.zeros_like(total), 2 * acc * gen / total)


def _require_square(accuracy: Tensor) -> None:
    if accuracy.ndim != 2 or accuracy.shape[0] != accuracy.shape[1]:
        raise ValueError(f"`accuracy` must be square (T, T), got shape {tuple(accuracy.shape)}.")
