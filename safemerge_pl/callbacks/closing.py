"""The table at the end of ``fit``, and what it has in common with the report."""

from typing import Any

import lightning as L

from safemerge_pl.callbacks.live import Live
from safemerge_pl.folding.bound import bound_settings, name_with_bound
from safemerge_pl.folding.report import FoldReport
from safemerge_pl.live import LiveMerger
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import MergeMethod
from safemerge_pl.metrics import AccuracyMatrix
from safemerge_pl.reports.stream import Report
from safemerge_pl.reports.tables import console_table
from safemerge_pl.runtime.console import console_width, show

__all__ = ["describe_stream", "last_drift", "last_row", "print_table"]


def describe_stream(
    trainer: L.Trainer, method: MergeMethod, merger: ContinualMerger | LiveMerger | None, live: Live | None
) -> Report:
    """What a report says besides its steps: tasks, control sets, method, and the rows that other callbacks measured.

    A callback has such rows if it says under which heading: ``heading = "references"`` or ``"compared"``.

    Args:
        trainer: of the run.
        method: of the stream.
        merger: knows the bound; ``None`` before ``fit``.
        live: in a training loop.

    Returns:
        A report (see :mod:`safemerge_pl.reports.stream`) without its steps.
    """
    if live is not None:
        tasks, controls, seed = live.named(trainer), live.scores.controls, None
    else:
        data = trainer.datamodule  # type: ignore[attr-defined]
        tasks, controls, seed = data.stream.names, data.controls, data.stream.order_seed
    bound = None if merger is None else merger.max_response
    max_drift = merger.max_drift if isinstance(merger, ContinualMerger) else None
    found: dict[str, dict[str, Any]] = {"references": {}, "compared": {}}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if getattr(callback, "heading", None) in found:
            found[callback.heading] |= callback.rows
    return {
        "tasks": list(tasks),
        "controls": list(controls),
        "order_seed": seed,
        "method": {
            "name": name_with_bound(method, bound, max_drift),
            "settings": {**method.settings(), **bound_settings(bound, max_drift)},
        },
        **found,
    }


def last_row(
    trainer: L.Trainer, pl_module: L.LightningModule, merger: ContinualMerger | LiveMerger, live: Live | None
) -> dict[str, Any]:
    """Scores after the last merge, as a row of a report: shares in [0, 1]; empty if it was not scored.

    Args:
        trainer: of the run.
        pl_module: knows the accuracy matrix of a stream of checkpoints.
        merger: knows the tasks.
        live: in a training loop, where it knows the scores.
    """
    count = len(merger.tasks)
    if live is not None:
        if not count or len(live.scores.rows) != count:
            return {}
        scores, row = live.scores.scores(merger.tasks), live.scores.rows[-1]
    else:
        matrix = getattr(pl_module, "matrix", None)
        if not count or not isinstance(matrix, AccuracyMatrix) or matrix.steps != count:
            return {}
        row, scores = matrix.row(count), matrix.defined()
    drift = last_drift(trainer, merger.reports[-1])
    return {
        **{name: value for name, value in scores.items() if name not in row},
        "accuracies": dict(row),
        **({} if drift is None else {"drift": drift}),
    }


def last_drift(trainer: L.Trainer, fold: FoldReport) -> float | None:
    """The drift of the last merge: from its fold, where a bound on it holds, or as a callback has measured it.

    A callback has measured drifts if it has a list of them, ``drifts``.

    Args:
        trainer: of the run.
        fold: the last one.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    measured: list[float] = next((callback.drifts for callback in callbacks if getattr(callback, "drifts", None)), [])
    return measured[-1] if fold.drift is None and measured else fold.drift


def print_table(stream: Report, row: dict[str, Any], merged: int) -> None:
    """Print the closing table.

    Args:
        stream: as :func:`describe_stream` gives it.
        row: after the last merge.
        merged: number of tasks merged.
    """
    show(console_table({**stream, "steps": [{}] * (merged - 1) + [row]}, console_width()))
