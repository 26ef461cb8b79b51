"""The accuracies of a merge stream as a torchmetrics class over :mod:`safemerge_pl.functional`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from safemerge_pl.functional import SCORES, average_accuracy, backward_transfer, general_average, h_score
from safemerge_pl.runtime.names import name_list

__all__ = ["AccuracyMatrix"]


class AccuracyMatrix(Metric):
    """Accuracy of every task after every merge, and of every control set after every merge.

    A few exact numbers: the states stay on the CPU in float64, wherever the module goes.

    The values must already be equal on all processes (each comes from its own synchronised accuracy metric), so the
    states are not reduced again. They are saved with the module and survive ``reset`` only if you do not call it:
    log the values, never this object (Lightning resets logged metrics each epoch).

    Args:
        tasks: names in the order of the stream.
        controls: names of the held-out control sets.

    Raises:
        ValueError: if a name is unknown, a step is out of range, or a value is not in ``[-1, 1]``.

    Example:
        >>> matrix = AccuracyMatrix(["mnist", "flags"], controls=["probe"])
        >>> matrix.update(1, {"mnist": 0.9, "probe": 0.5})
        >>> matrix.update(2, {"mnist": 0.7, "flags": 0.8, "probe": 0.4})
        >>> {name: round(value.item(), 4) for name, value in matrix.compute().items()}
        {'ACC': 0.75, 'Gen': 0.4, 'H': 0.5217, 'BWT': -0.2}
    """

    full_state_update = True
    is_differentiable = False
    higher_is_better = True

    accuracy: Tensor
    general: Tensor

    def __init__(self, tasks: str | Sequence[str], controls: str | Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(sync_on_compute=False, **kwargs)
        self.tasks, self.controls = tuple(name_list(tasks, "tasks")), tuple(name_list(controls, "controls"))
        twins = [name for name, count in Counter((*self.tasks, *self.controls)).items() if count > 1]
        if twins:
            raise ValueError(f"`tasks` and `controls` must have distinct names, got {', '.join(twins)} more than once.")
        t, g = len(self.tasks), len(self.controls)
        self.add_state("accuracy", torch.full((t, t), torch.nan, dtype=torch.float64), persistent=True)
        self.add_state("general", torch.full((t, g), torch.nan, dtype=torch.float64), persistent=True)

    def update(self, step: int, accuracies: Mapping[str, float | Tensor]) -> None:
        """Enter the row of one merge.

        Args:
            step: how many tasks are merged, from 1.
            accuracies: by task or control set: a share in ``[0, 1]``, or a correlation in ``[-1, 1]`` where a set is
                scored so; what is left out stays as it was.
        """
        if not 1 <= step <= len(self.tasks):
            raise ValueError(f"`step` must be in [1, {len(self.tasks)}], got {step}.")
        shares = {name: float(value) for name, value in accuracies.items()}
        for name, share in shares.items():
            if not -1.0 <= share <= 1.0:
                raise ValueError(f"the accuracy of '{name}' must be in [0, 1] (a correlation in [-1, 1]), got {share}.")
            if name not in self.tasks and name not in self.controls:
                raise ValueError(f"'{name}' is neither a task ({', '.join(self.tasks)}) nor a control set.")
        for name, share in shares.items():
            if name in self.tasks:
                self.accuracy[step - 1, self.tasks.index(name)] = share
            else:
                self.general[step - 1, self.controls.index(name)] = share

    def forward(self, step: int, accuracies: Mapping[str, float | Tensor]) -> dict[str, Tensor]:
        """Enter the row of one merge, as :meth:`update` does, and give the scores after it.

        torchmetrics would reset the state and give the scores of this row alone; but BWT compares the row with those of
        the merges before it.

        Example:
            >>> matrix = AccuracyMatrix(["mnist", "flags"])
            >>> _ = matrix(1, {"mnist": 0.75})
            >>> matrix(2, {"mnist": 0.5, "flags": 1.0})["BWT"].item()
            -0.25
        """
        self.update(step, accuracies)
        scores = self.at(step)
        self._forward_cache: Any = scores  # where Lightning looks for the value of a step
        return scores

    def compute(self) -> dict[str, Tensor]:
        """ACC, BWT, Gen. and H after the last merge that was entered; NaN where a value is undefined."""
        return self.at(self.steps)

    def defined(self) -> dict[str, float]:
        """The scores of :meth:`compute` that are defined, as plain numbers in [-1, 1].

        Example:
            >>> matrix = AccuracyMatrix(["mnist", "flags"])
            >>> matrix.update(1, {"mnist": 0.75})
            >>> matrix.defined()
            {'ACC': 0.75}
        """
        return {name: value.item() for name, value in self.compute().items() if not value.isnan()}

    @property
    def steps(self) -> int:
        """The last merge of which a row was entered; 0 before the first."""
        filled = ~(self.accuracy.isnan().all(1) & self.general.isnan().all(1))
        return int(filled.nonzero().max()) + 1 if filled.any() else 0

    def row(self, step: int) -> dict[str, float]:
        """The accuracies that were entered after ``step`` merges, by task and control set.

        Example:
            >>> matrix = AccuracyMatrix(["mnist", "flags"], controls=["probe"])
            >>> matrix.update(1, {"mnist": 0.75, "probe": 0.5})
            >>> matrix.row(1)
            {'mnist': 0.75, 'probe': 0.5}
        """
        values = [*self.accuracy[step - 1].tolist(), *self.general[step - 1].tolist()]
        return {n: v for n, v in zip((*self.tasks, *self.controls), values, strict=True) if v == v}

    def at(self, step: int) -> dict[str, Tensor]:
        """ACC, BWT, Gen. and H as they stood after ``step`` merges."""
        accuracy = self.accuracy[:step, :step]
        acc, bwt = average_accuracy(accuracy), backward_transfer(accuracy)
        row = self.general[step - 1] if step else self.general.new_full((len(self.controls),), torch.nan)
        gen = general_average(row)
        return dict(zip(SCORES, (acc, gen, h_score(acc, gen), bwt), strict=True))

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> "AccuracyMatrix":
        return self  # neither another device nor another dtype

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._computed, self._update_count = None, self.steps  # else computing before an update warns
