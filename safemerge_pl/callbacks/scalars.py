"""The numbers of a fold that loggers get."""

import functools
from collections.abc import Callable

import lightning as L

from safemerge_pl.architectures.groups import FATES
from safemerge_pl.folding.fates import total
from safemerge_pl.folding.report import FoldReport

__all__ = ["FOLD_SCALARS", "log_fold"]


def _share(report: FoldReport, fate: str) -> float | None:
    """What became of the squared task vector, all groups together."""
    return getattr(total(report.shares), fate) if report.shares else None


FOLD_SCALARS: dict[str, Callable[[FoldReport], float | None]] = {
    "merge/kept_fraction": lambda report: report.kept_fraction,
    "merge/seconds": lambda report: report.seconds,
    "merge/task_norm": lambda report: sum(row.task_norm**2 for row in report.layers) ** 0.5,
    "merge/update_norm": lambda report: sum(row.update_norm**2 for row in report.layers) ** 0.5,
    "merge/response": lambda report: report.response,
    "merge/scale": lambda report: None if report.response is None else report.scale,
    "merge/drift": lambda report: report.drift,
    **{f"merge/share/{fate}": functools.partial(_share, fate=fate) for fate in FATES},
    "merge/leading": lambda report: report.leading,
    "merge/loss_first": lambda report: report.losses[0] if report.losses else None,
    "merge/loss_last": lambda report: report.losses[-1] if report.losses else None,
}
"""Each name that loggers get, and what reads the number from a report; ``None`` if this fold has no such number.

To log one more number, add a line. Names of scores are in :mod:`safemerge_pl.scoring.tags`.
"""


def log_fold(trainer: L.Trainer, report: FoldReport) -> None:
    """Log what a fold did over the number of merged tasks, and its loss over the steps of the inner optimisation."""
    numbers = {name: read(report) for name, read in FOLD_SCALARS.items()}
    for logger in trainer.loggers:
        logger.log_metrics({name: value for name, value in numbers.items() if value is not None}, step=report.index)
        for step, loss in enumerate(report.losses):
            logger.log_metrics({f"recovery/{report.index:02d}_{report.task}": loss}, step=step)
