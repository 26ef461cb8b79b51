"""What only TensorBoard shows: charts of several curves, the accuracy matrix, the report, and scores by settings."""

import dataclasses
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from safemerge_pl.functional import SCORES
from safemerge_pl.methods import MergeMethod
from safemerge_pl.reports.stream import Report
from safemerge_pl.reports.tables import markdown
from safemerge_pl.reports.thumbnail import thumbnail_figure

__all__ = ["LAYOUT", "finish_board", "log_layout", "log_matrix"]

LAYOUT: dict[str, dict[str, list[Any]]] = {
    "merge stream": {
        "ACC, Gen and H": ["Multiline", [r"stream/ACC$", r"stream/Gen$", r"stream/H$"]],
        "all tasks": ["Multiline", [r"task/.*/acc$"]],
        "control sets": ["Multiline", [r"control/.*/acc$"]],
    },
    "recovery": {"loss over the steps": ["Multiline", [r"recovery/"]]},
}
"""Charts of the tab *Custom scalars*: by group and title, each with the tags of its curves as regular expressions."""


def log_layout(trainer: L.Trainer, *, controls: bool, recovery: bool) -> None:
    """Put the curves that belong together into one chart each; call it once a run.

    Args:
        trainer: whose loggers are told.
        controls: whether there are control sets.
        recovery: whether the method has an inner optimisation.
    """
    empty = {"control sets": not controls, "loss over the steps": not recovery}
    charts = {group: {k: v for k, v in found.items() if not empty.get(k)} for group, found in LAYOUT.items()}
    layout = {group: found for group, found in charts.items() if found}
    for board in _boards(trainer):
        board.experiment.add_custom_scalars(layout)


def log_matrix(trainer: L.Trainer, report: Report) -> None:
    """Draw the accuracy matrix so far, legible in a card.

    Args:
        trainer: whose loggers are told.
        report: so far, see :mod:`safemerge_pl.reports.stream`.
    """
    step = len(report["steps"])
    for board in _boards(trainer):
        board.experiment.add_figure("stream/matrix", thumbnail_figure(report), global_step=step, close=False)


def finish_board(trainer: L.Trainer, method: MergeMethod, report: Report) -> None:
    """Write the report as text, and the method with its final scores under HPARAMS.

    Args:
        trainer: whose loggers are told.
        method: of the stream.
        report: at the end, see :mod:`safemerge_pl.reports.stream`.
    """
    steps = report["steps"]
    text = "\n".join(line for line in markdown(report).splitlines() if not line.startswith("!["))  # no files there
    # a column is 160 pixels wide at least: in a window of 1,280 there is room for one before the four scores
    hparams = {"method": f"{report['method']['name']}: {_settings(method, report)}"}
    scores = {f"hp/{key}": steps[-1][key] for key in SCORES if key in steps[-1]}
    for board in _boards(trainer):
        board.experiment.add_text("report", text, global_step=len(steps))
        board.log_hyperparams(hparams, scores)
        board.save()


def _settings(method: MergeMethod, report: Report) -> str:
    """What makes this run different from others: settings off the method's defaults, the order, the number of tasks."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    parts = [f"{f.name}={getattr(method, f.name)}" for f in fields if getattr(method, f.name) != f.default]
    parts += [] if report["order_seed"] is None else [f"order {report['order_seed']}"]
    return ", ".join([*parts, f"{len(report['tasks'])} tasks"])


def _boards(trainer: L.Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
