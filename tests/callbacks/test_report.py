"""What a run leaves for people to read: report, figures, TensorBoard."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from event_files import scalars
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from loops import TASKS, Classifier, Tasks, accuracies, batches, live
from small import RANKS

from safemerge_pl.callbacks import ReferenceRows, StreamReport
from safemerge_pl.folding.fates import total
from safemerge_pl.module import ContinualMergeModule

Make = Callable[..., Any]


pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


def test_tensorboard_shows_the_stream(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """Scalars over the number of merged tasks, no NaN, a heat map, recovery curves, hparams with H."""
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    merge = merge_callback()
    make_trainer(merge, ReferenceRows(individual=False), StreamReport(), logger=logger).fit(module, small_data())
    found = scalars(Path(logger.log_dir))
    assert [step for step, _ in found["stream/ACC"]] == [0, 1, 2, 3]  # 0 is the pretrained model
    assert [step for step, _ in found["stream/BWT"]] == [2, 3]  # undefined for one task
    assert [step for step, _ in found["stream/H"]] == [step for step, _ in found["stream/Gen"]] == [0, 1, 2, 3]
    assert [step for step, _ in found["task/mnist/acc"]] == [0, 3]
    assert len(found["control/clipart_category/acc"]) == 4
    assert [round(value, 3) for _, value in found["merge/kept_fraction"]] == [0.5] * 3
    assert len(found["recovery/02_weather"]) == RANKS["num_steps"] + 1
    assert found["hp/H"][0][1] == pytest.approx(module.last_scores["H"])
    assert "stream/matrix" in found
    assert not any(value != value for points in found.values() for _, value in points)
    folder = Path(logger.log_dir)
    assert {"report.json", "report.md", "matrix.png", "stream.png"} <= {path.name for path in folder.iterdir()}
    text = (folder / "report.md").read_text()
    assert "| **ACC** |" in text
    assert "| # | task | merged | masked away | recovered | left pretrained | leading directions |" in text
    assert f"| 2 | weather | {100 * total(merge.reports[1].shares).merged:.1f} |" in text
    assert "NaN" not in (folder / "report.json").read_text()


def test_other_loggers(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """Two loggers at once, none of them TensorBoard."""
    loggers = [CSVLogger(tmp_path, "a"), CSVLogger(tmp_path, "b")]
    make_trainer(merge_callback(), StreamReport(), logger=loggers, max_epochs=2).fit(module, small_data())
    assert "stream/H" in (tmp_path / "b" / "version_0" / "metrics.csv").read_text()
    assert (tmp_path / "a" / "version_0" / "report.json").exists()


def test_report_and_tensorboard_show_training_and_stream(make_trainer: Make, tmp_path: Path) -> None:
    """Curves of the training stand beside the scores of the merge, H among them where control sets are given."""

    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss)
            return loss

    def score(trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        assert isinstance(module, Classifier)
        return {**accuracies(module), "probe": 0.5}

    logger = TensorBoardLogger(tmp_path)
    merge = live(tasks=TASKS, score=score, controls=["probe"])
    before, after = StreamReport(), StreamReport(folder=str(tmp_path / "copy"))  # wherever it stands in the list
    after.__class__ = type("Copy", (StreamReport,), {})
    make_trainer(before, merge, after, logger=logger, max_epochs=6).fit(Logs(), Tasks())
    found = scalars(Path(logger.log_dir))
    assert len(found["train/loss"]) == 12
    assert [step for step, _ in found["stream/ACC"]] == [step for step, _ in found["stream/H"]] == [1, 2, 3]
    assert [step for step, _ in found["stream/BWT"]] == [2, 3]
    assert [value for _, value in found["control/probe/acc"]] == [0.5] * 3
    assert [step for step, _ in found["task/c/acc"]] == [3]
    assert "stream/matrix" in found
    assert len(found["recovery/02_b"]) == 4
    assert "hp/H" in found
    for folder in (Path(logger.log_dir), tmp_path / "copy"):
        assert {"report.json", "report.md", "matrix.png", "stream.png"} <= {path.name for path in folder.iterdir()}
        report = json.loads((folder / "report.json").read_text())
        assert report["tasks"] == TASKS
        assert report["controls"] == ["probe"]
        assert [step["task"] for step in report["steps"]] == TASKS
        assert report["steps"][2]["source"] == "trained until step 12"
        assert merge.live is not None
        assert report["steps"][2]["accuracies"] == merge.live.scores.rows[2]
        assert report["merged"] == merge.reports[2].merged


def test_the_report_of_one_fit_a_task_grows(make_trainer: Make, tmp_path: Path) -> None:
    report, module = StreamReport(folder=str(tmp_path)), Classifier()
    merge = live(boundary="fit", score=lambda trainer, module: {f"task{n}": 0.25 * n for n in (1, 2)})
    for number in range(2):
        make_trainer(report, merge, max_epochs=1).fit(module, batches(number))
    content = json.loads((tmp_path / "report.json").read_text())
    assert [step["accuracies"] for step in content["steps"]] == [{"task1": 0.25}, {"task1": 0.25, "task2": 0.5}]
    assert content["tasks"] == ["task1", "task2"]
    assert content["steps"][1]["BWT"] == 0.0
