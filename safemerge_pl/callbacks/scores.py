"""Accuracies of the merged weights at the boundaries of a training loop, and what they add up to."""

import difflib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.metrics import AccuracyMatrix
from safemerge_pl.runtime.modes import evaluating
from safemerge_pl.runtime.names import name_list

__all__ = ["Score", "StreamScores"]

Score = Callable[[L.Trainer, L.LightningModule], Mapping[str, Any]]


class StreamScores:
    """The rows of the accuracy matrix so far.

    Args:
        metric: name under which the module logs its accuracy in validation: with ``{task}`` in it one name per task,
            else one validation loader per task (and after them one per control set), in the order of the tasks.
        score: function that measures accuracies by task, in the place of ``metric``.
        controls: names of held-out sets in either.
    """

    def __init__(self, metric: str | None, score: Score | None, controls: str | Sequence[str]) -> None:
        if metric is not None and score is not None:
            raise ValueError("give `metric` or `score`, not both.")
        if controls and metric is None and score is None:
            raise ValueError("`controls` needs `metric` or `score`, which measure them.")
        self.metric, self.score, self.controls = metric, score, tuple(name_list(controls, "controls"))
        self.rows: list[dict[str, float]] = []
        self.seconds: float | None = None  # that `score` took last

    def call(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """What the user's function measures, without gradients and with the module in evaluation mode."""
        assert self.score is not None
        start = time.perf_counter()
        with evaluating(pl_module), torch.no_grad():
            found = dict(self.score(trainer, pl_module))
        self.seconds = time.perf_counter() - start
        return found

    def read(self, trainer: L.Trainer, planned: Sequence[str]) -> dict[str, Any]:
        """What the module logged in the validation that has just run."""
        assert self.metric is not None
        logged, loaders = trainer.callback_metrics, len(trainer.num_val_batches)
        if "{task}" in self.metric:
            return {n: logged[k] for n in (*planned, *self.controls) if (k := self.metric.format(task=n)) in logged}
        tasks = loaders - len(self.controls)
        if not 0 < tasks <= len(planned):
            raise MisconfigurationException(
                f"`metric` '{self.metric}' needs one validation loader a task and then one a control set: there are "
                f"{loaders} loaders for {len(planned)} tasks and {len(self.controls)} control sets; name the tasks "
                "with `tasks`, or use `score`."
            )
        names = (*planned[:tasks], *self.controls)
        keys = [f"{self.metric}/dataloader_idx_{i}" for i in range(loaders)] if loaders > 1 else [self.metric]
        return {name: logged[key] for name, key in zip(names, keys, strict=True) if key in logged}

    def check(self, trainer: L.Trainer, planned: Sequence[str]) -> None:
        """See at the first validation, long before the first boundary, that ``metric`` is logged at all, and as shares.

        Which sets the module scores before a boundary is its own affair.

        Args:
            trainer: at the end of a validation. (In the sanity check Lightning shows no metric of several loaders.)
            planned: names of all tasks.

        Raises:
            MisconfigurationException: naming what was logged instead.
        """
        assert self.metric is not None
        logged, each = trainer.callback_metrics, "{task}" in self.metric
        wanted = {self.metric.format(task=name) if each else self.metric for name in (*planned, *self.controls)}
        names = {key for key in logged if key.partition("/dataloader_idx_")[0] in wanted}
        found = trainer.strategy.broadcast({name: float(logged[name]) for name in names})
        if not found:
            raise self._missing(planned[0], logged)
        for name, value in sorted(found.items()):
            if abs(value) > 1.0:
                raise MisconfigurationException(
                    f"`metric`: '{name}' must be a share in [0, 1] (a correlation in [-1, 1]), got {value:g}."
                )

    def enter(self, found: Mapping[str, Any], merged: Sequence[str], logged: Mapping[str, Any]) -> dict[str, float]:
        """Add the row after the latest merge.

        Args:
            found: accuracies as shares in [0, 1]; sets that are neither merged nor a control are ignored.
            merged: tasks merged so far.
            logged: everything that the module logged, for the message.

        Returns:
            The accuracies by set, and ACC, BWT, Gen. and H where they are defined.

        Raises:
            MisconfigurationException: if a merged task or a control set was not measured, or a value is not in [0, 1].
        """
        wanted = (*merged, *self.controls)
        missing = [name for name in wanted if name not in found]
        if missing:
            raise self._missing(missing[0], logged if self.metric else found)
        lost: list[dict[str, float]] = [{}] * (len(merged) - 1 - len(self.rows))
        self.rows = [*self.rows[: len(merged) - 1], *lost, {name: float(found[name]) for name in wanted}]
        return self.scores(merged)

    def scores(self, merged: Sequence[str]) -> dict[str, float]:
        """The latest row with ACC, BWT, Gen. and H."""
        matrix = AccuracyMatrix(merged, self.controls)
        for step, row in enumerate(self.rows, 1):
            try:
                matrix.update(step, row)
            except ValueError as error:
                raise MisconfigurationException(f"a score cannot enter the accuracy matrix: {error}") from error
        return {**self.rows[-1], **matrix.defined()}

    def _missing(self, name: str, known: Iterable[str]) -> MisconfigurationException:
        """The error that a set was not measured, with the names that may have been meant."""
        where = f"`metric` '{self.metric}' was not logged" if self.metric else "`score` returned nothing"
        names = {key.partition("/dataloader_idx_")[0] for key in known}
        near = difflib.get_close_matches(self.metric or name, names, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else "."
        return MisconfigurationException(f"{where} for '{name}'{hint}")
