"""Streams under loggers of several makers, offline, and under none; the closing table under all of them."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger
from loops import TASKS, Classifier, Tasks, live

from safemerge_pl.callbacks import StreamReport
from safemerge_pl.callbacks.report import run_folder

Make = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


def score(trainer: L.Trainer, module: Any) -> dict[str, float]:
    """0.5 for a task when it is merged, 0.25 less with every merge after it."""
    done = len(trainer.callbacks[0].tasks)  # type: ignore[attr-defined]
    return {name: max(0.0, 0.75 - 0.25 * (done - place)) for place, name in enumerate(TASKS[:done])} | {"probe": 0.5}


ACC, H = [0.5, 0.375, 0.25], [0.5, 2 * 0.375 * 0.5 / 0.875, 2 * 0.25 * 0.5 / 0.75]


def fit(make_trainer: Make, logger: Any, **options: Any) -> L.Trainer:
    merge = live(epochs_per_task=1, tasks=TASKS, score=score, controls=["probe"])
    trainer: L.Trainer = make_trainer(merge, StreamReport(figures=False), logger=logger, max_epochs=3, **options)
    trainer.fit(Classifier(), Tasks(1))
    return trainer


def written(trainer: L.Trainer) -> list[str]:
    report = json.loads((run_folder(trainer) / "report.json").read_text())
    return [step["task"] for step in report["steps"]]


def test_csv(make_trainer: Make, tmp_path: Path) -> None:
    trainer = fit(make_trainer, CSVLogger(tmp_path))
    rows = list(csv.DictReader((Path(str(trainer.log_dir)) / "metrics.csv").read_text().splitlines()))
    found = {int(row["step"]): float(row["stream/H"]) for row in rows if row["stream/H"]}
    assert found == pytest.approx(dict(enumerate(H, 1)))
    assert len([row for row in rows if row["recovery/02_b"]]) == 4
    assert written(trainer) == TASKS


def test_no_logger(make_trainer: Make, tmp_path: Path) -> None:
    trainer = fit(make_trainer, False)
    assert run_folder(trainer) == tmp_path / "safemerge"
    assert written(trainer) == TASKS


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
def test_wandb(make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline; what was logged is read from the run's own file. Each run has a folder of its own."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    from lightning.pytorch.loggers import WandbLogger

    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="merging")
    trainer = fit(make_trainer, logger)
    summary = dict(logger.experiment.summary)
    logger.experiment.finish()
    assert summary["stream/ACC"] == pytest.approx(ACC[-1])
    assert summary["stream/H"] == pytest.approx(H[-1])
    assert summary["task/a/acc"] == 0.0
    assert "recovery/03_c" in summary
    assert run_folder(trainer) == tmp_path / "merging" / str(logger.version)
    assert written(trainer) == TASKS


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
def test_mlflow(make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store of files, which the small package has; every name is one that MLflow takes as it is."""
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    from lightning.pytorch.loggers import MLFlowLogger

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger("merging", tracking_uri=(tmp_path / "runs").as_uri())
    trainer = fit(make_trainer, logger)
    history = {
        name: [(point.step, point.value) for point in logger.experiment.get_metric_history(logger.run_id, name)]
        for name in ("stream/ACC", "stream/H", "recovery/02_b")
    }
    assert history["stream/ACC"] == list(enumerate(ACC, 1))
    assert [value for _, value in history["stream/H"]] == pytest.approx(H)
    assert [step for step, _ in history["recovery/02_b"]] == [0, 1, 2, 3]
    assert run_folder(trainer).name == logger.run_id
    assert written(trainer) == TASKS


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec")
@pytest.mark.parametrize("report", [None, StreamReport(enabled=False), StreamReport(figures=False)])
def test_the_closing_table_needs_no_report(
    report: StreamReport | None, make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is printed once, when all else is done, unless there is no progress bar."""
    for bar in (True, False):
        merge = live(epochs_per_task=1, tasks=TASKS, score=score, controls=["probe"])
        callbacks = [merge, *([] if report is None else [report])]
        make_trainer(*callbacks, max_epochs=3, enable_progress_bar=bar).fit(Classifier(), Tasks(1))
        text = capsys.readouterr().out
        assert text.count("SAFE-Merge: 3 of 3 tasks merged (accuracy in %)") == bar  # on one line
        table = dict(re.findall(r"^(\S+) +│ +(\S+)$", text, re.MULTILINE))
        wanted = {"ACC": "25.0", "Gen": "50.0", "H": "33.3", "BWT": "-37.5"}
        assert table == ({**wanted, "a": "0.0", "b": "25.0", "c": "50.0", "probe": "50.0"} if bar else {})


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec")
def test_what_was_not_scored_has_no_table(make_trainer: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(live(epochs_per_task=1), max_epochs=1, enable_progress_bar=True).fit(Classifier(), Tasks(1))
    assert "tasks merged" not in capsys.readouterr().out
