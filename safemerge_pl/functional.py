"""The scores of a merge stream: their names and their formulas (paper, section 5.1).

``accuracy[i, j]`` is the accuracy on task ``j`` after merge ``i`` (both from 0), in whatever unit the caller uses;
NaN means *not measured*. A score that is undefined is NaN, never 0; among plain numbers it is left out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["SCORES", "average_accuracy", "backward_transfer", "general_average", "h_score", "summarise"]

SCORES = ("ACC", "Gen", "H", "BWT")
"""Names of the scores in logs, files, tables and figures, in the order in which tables show them."""


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


def summarise(
    tasks: Sequence[float], controls: Sequence[float], when_merged: Sequence[float] | None = None
) -> dict[str, float]:
    """Those of :data:`SCORES` that are defined, of one model that was scored on everything.

    Args:
        tasks: accuracy on each task, in the order of the stream.
        controls: accuracy on each control set.
        when_merged: accuracy on each task right after it was merged, for BWT; left out where nothing was merged.

    Returns:
        Plain numbers in the order of :data:`SCORES`; equal to the tensor functions but for the rounding of a sum.

    Raises:
        ValueError: if ``when_merged`` has not one entry per task.

    Example:
        >>> summarise([0.5, 1.0], [0.25, 0.5])
        {'ACC': 0.75, 'Gen': 0.375, 'H': 0.5}
        >>> summarise([0.5, 1.0], [], when_merged=[0.75, 1.0])
        {'ACC': 0.75, 'BWT': -0.25}
    """
    scores = {}
    if tasks:
        scores["ACC"] = _mean(tasks)
    if controls:
        scores["Gen"] = _mean(controls)
    if tasks and controls:
        acc, gen = torch.tensor([scores["ACC"], scores["Gen"]], dtype=torch.float64)
        scores["H"] = h_score(acc, gen).item()
    if when_merged is not None:
        changes = [last - first for last, first in zip(tasks, when_merged, strict=True)][:-1]
        if changes:
            scores["BWT"] = _mean(changes)
    return scores


def _mean(values: Sequence[float]) -> float:
    """Added from left to right: a tensor's sum goes another way, and scores on disk must be found again to the bit."""
    return sum(values) / len(values)


def _require_square(accuracy: Tensor) -> None:
    if accuracy.ndim != 2 or accuracy.shape[0] != accuracy.shape[1]:
        raise ValueError(f"`accuracy` must be square (T, T), got shape {tuple(accuracy.shape)}.")
