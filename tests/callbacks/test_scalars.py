"""What loggers get of a fold."""

from types import SimpleNamespace
from typing import Any

import pytest

from safemerge_pl.callbacks import scalars
from safemerge_pl.callbacks.scalars import log_fold
from safemerge_pl.folding.report import FoldReport, LayerReport


class Notes:
    """A logger."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))


def logged(losses: tuple[float, ...]) -> list[tuple[int, dict[str, float]]]:
    rows = tuple(LayerReport(name, 0.5, None, None, norm, 2 * norm) for name, norm in (("a", 3.0), ("b", 4.0)))
    report = FoldReport(
        task="mnist",
        index=2,
        source="here",
        incoming="0a",
        merged="0b",
        seconds=1.5,
        solve_seconds=1.0,
        kept_fraction=0.5,
        losses=losses,
        layers=rows,
        notes=(),
    )
    trainer: Any = SimpleNamespace(loggers=[Notes(), Notes()])
    log_fold(trainer, report)
    assert trainer.loggers[0].rows == trainer.loggers[1].rows
    found: list[tuple[int, dict[str, float]]] = trainer.loggers[0].rows
    return found


def test_norms_are_those_of_the_whole_fold_and_losses_a_curve() -> None:
    (step, numbers), *curve = logged((9.0, 1.0))
    assert step == 2
    assert numbers["merge/task_norm"] == 5.0
    assert numbers["merge/update_norm"] == 10.0
    assert (numbers["merge/loss_first"], numbers["merge/loss_last"]) == (9.0, 1.0)
    assert curve == [(0, {"recovery/02_mnist": 9.0}), (1, {"recovery/02_mnist": 1.0})]


def test_a_method_without_an_inner_optimisation_logs_no_loss() -> None:
    assert [set(numbers) for _, numbers in logged(())] == [
        {"merge/kept_fraction", "merge/seconds", "merge/task_norm", "merge/update_norm"}
    ]


def test_a_line_in_the_table_is_a_number_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scalars.FOLD_SCALARS, "merge/layers", lambda report: float(len(report.layers)))
    assert logged(())[0][1]["merge/layers"] == 2.0
