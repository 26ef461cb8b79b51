"""The drift of every merge of a stream, wherever its numbers go."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from event_files import scalars
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import TensorBoardLogger
from loops import Classifier, Tasks, live
from small import TASKS, tower

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.callbacks import ComparedMethod, DriftMonitor, MethodComparison, StreamReport
from safemerge_pl.checkpoints.open import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, TaskArithmetic
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.scoring import DriftGauge
from safemerge_pl.scoring.drift import require_gauge
from safemerge_pl.zoo import FILES

Make = Callable[..., Any]


@pytest.fixture
def fit(module: ContinualMergeModule, small_data: Make, make_trainer: Make) -> Callable[..., None]:
    """One run of the small stream with the given callbacks."""
    return lambda *callbacks: make_trainer(*callbacks).fit(module, small_data())


def test_every_merge_is_measured_and_a_resumed_run_goes_on(
    small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """As by hand, before and after a resume: the pretrained model is what all are compared with."""
    whole, report = DriftMonitor(16), StreamReport()
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    compare = MethodComparison([ComparedMethod(TaskArithmetic())])
    trainer = make_trainer(merge_callback(), whole, compare, report, logger=logger)
    trainer.fit(ContinualMergeModule(), small_data())
    assert len(whole.drifts) == len(TASKS)
    assert whole.drifts == _by_hand(merge_callback().method)
    assert compare.rows["Task Arithmetic"]["drift"] == _by_hand(TaskArithmetic())[-1]
    folder = Path(logger.log_dir)
    assert scalars(folder)["merge/drift"] == [
        (step, pytest.approx(drift)) for step, drift in enumerate(whole.drifts, start=1)
    ]
    steps = json.loads((folder / "report.json").read_text())["steps"]
    assert [step["drift"] for step in steps] == whole.drifts
    text = (folder / "report.md").read_text()
    assert f"| drift | {100 * whole.drifts[-1]:.1f} | {100 * compare.rows['Task Arithmetic']['drift']:.1f} |" in text
    assert "| deployed | drift |" in text or "| kept | drift |" in text

    first = DriftMonitor(16)
    begun = make_trainer(merge_callback(), first, max_epochs=2)
    begun.fit(ContinualMergeModule(), small_data())
    begun.save_checkpoint(tmp_path / "two.ckpt")
    second = DriftMonitor(16)
    make_trainer(merge_callback(), second).fit(ContinualMergeModule(), small_data(), ckpt_path=tmp_path / "two.ckpt")
    assert second.drifts == whole.drifts


def _by_hand(method: Any) -> list[float]:
    backbone = CLIPBackbone("zoo")
    backbone.load()
    gauge = DriftGauge(backbone, backbone.noise(16), tower=backbone.vision_model)
    merger, found = ContinualMerger(backbone.vision_model, method), []
    for task in TASKS:
        merger.fold(FILES / "experts" / task, task)
        found.append(gauge.measure(merger.merged_parameters()))
    return found


def test_a_stream_stops_where_the_model_has_moved_too_far(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    stop = EarlyStopping("merge/drift", patience=99, divergence_threshold=1e-6)
    trainer = make_trainer(merge_callback(), DriftMonitor(16), stop)
    trainer.fit(module, small_data())
    assert trainer.callback_metrics["merge/drift"] > 1e-6
    assert module.merged_tasks == TASKS[:1]


def test_what_cannot_be_measured_is_refused_before_anything_is_merged(
    module: ContinualMergeModule, fit: Make, make_trainer: Make, merge_callback: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="`count` must be at least 1"):
        DriftMonitor(0)
    with pytest.raises(MisconfigurationException, match="no MergeCallback"):
        fit(DriftMonitor())
    with pytest.raises(MisconfigurationException, match="in a training loop measure"):
        make_trainer(live(), DriftMonitor(), max_epochs=2).fit(Classifier(), Tasks())
    monkeypatch.setattr(CLIPBackbone, "noise", lambda self, count: None)
    with pytest.raises(MisconfigurationException, match="give your backbone a method `noise`"):
        fit(merge_callback(), DriftMonitor())
    assert module.merged_tasks == []


def test_validation_alone_measures_nothing(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    monitor = DriftMonitor()
    trainer: L.Trainer = make_trainer(merge_callback(), monitor)
    trainer.validate(module, small_data(), verbose=False)
    assert monitor.drifts == []
    assert torch.equal(torch.tensor(monitor.state_dict()["drifts"]), torch.tensor([]))


BOUND = 2e-3


def test_a_bound_on_the_drift_holds_after_every_merge_and_a_resume(
    small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """The same merge for the same bound, in one run or two; saved, and not continued without it."""
    module, merge = ContinualMergeModule(), merge_callback(max_drift=BOUND)
    monitor, report = DriftMonitor(), StreamReport()
    compare = MethodComparison([ComparedMethod(TaskArithmetic(), max_drift=BOUND)])
    make_trainer(merge, monitor, compare, report).fit(module, small_data())
    assert [fold.drift for fold in merge.reports] == monitor.drifts
    assert all(drift <= BOUND for drift in monitor.drifts)
    bounded = [fold.drift for fold in merge.reports if fold.scale < 1]
    assert len(bounded) >= 2
    assert all(drift > 0.9 * BOUND for drift in bounded)
    row = compare.rows["Task Arithmetic, drift at most 0.2 %"]
    assert 0.9 * BOUND < row["drift"] <= BOUND
    assert report.content(module.trainer)["method"]["name"] == "SAFE-Merge, drift at most 0.2 %"

    begun, bound, alone = ContinualMergeModule(), merge_callback(max_drift=BOUND), StreamReport()
    first = make_trainer(bound, alone, max_epochs=2)
    first.fit(begun, small_data())
    assert [step["drift"] for step in alone.steps] == monitor.drifts[:2]  # known without a monitor, too
    first.save_checkpoint(tmp_path / "two.ckpt")
    resumed, again = ContinualMergeModule(), merge_callback(max_drift=BOUND)
    make_trainer(again, StreamReport()).fit(resumed, small_data(), ckpt_path=tmp_path / "two.ckpt")
    assert [fold.merged for fold in again.reports] == [fold.merged for fold in merge.reports]
    whole, parts = tower(module), tower(resumed)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    with pytest.raises(MisconfigurationException, match=r"`max_drift` 0\.002, not None"):
        make_trainer(merge_callback(), StreamReport()).fit(
            ContinualMergeModule(), small_data(), ckpt_path=tmp_path / "two.ckpt"
        )

    assert isinstance(merge.merger, ContinualMerger)
    folder = merge.merger.save(tmp_path / "out", template=FILES / "model")
    assert "drift of features of noise at most 0.20%" in (folder / "README.md").read_text()
    with pytest.raises(CheckpointError, match="give the `gauge` that measures it"):
        ContinualMerger.load(folder, FILES / "model")
    backbone = CLIPBackbone("zoo")
    backbone.load()
    gauge = DriftGauge(backbone, backbone.noise(256), tower=backbone.vision_model)
    loaded = ContinualMerger.load(folder, backbone.vision_model, max_drift=BOUND, gauge=gauge.measure)
    assert gauge.measure(loaded.merged_parameters()) == monitor.drifts[-1]


def test_bounds_that_cannot_hold_are_refused(
    module: ContinualMergeModule, fit: Make, merge_callback: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bad in (0, -1.0, 2.0, float("nan"), float("inf"), True, "much"):
        with pytest.raises(ValueError, match="`max_drift` must be a number"):
            merge_callback(max_drift=bad)
    with pytest.raises(ValueError, match="for streams of checkpoints"):
        merge_callback(max_drift=BOUND, epochs_per_task=1)
    with pytest.raises(ValueError, match="needs a `gauge`"):
        ContinualMerger(FILES / "model", max_drift=BOUND)
    with pytest.raises(ValueError, match="on one process only"):
        require_gauge(module.backbone, world_size=2)
    monkeypatch.setattr(CLIPBackbone, "noise", lambda self, count: None)
    with pytest.raises(MisconfigurationException, match="what noise this model takes"):
        fit(merge_callback(max_drift=BOUND))
    with pytest.raises(MisconfigurationException, match=r"OPCM, drift at most 0\.2 %: .*what noise this model takes"):
        fit(merge_callback(), MethodComparison([ComparedMethod(OPCM(), max_drift=BOUND)]))
    assert module.merged_tasks == []


def test_a_bound_in_python_refuses_processes_and_a_broken_model() -> None:
    """Nothing is merged then."""
    merger = ContinualMerger(FILES / "model", TaskArithmetic(), max_drift=BOUND, gauge=lambda weights: float("nan"))
    with pytest.raises(CheckpointError, match="task 'mnist': the merge cannot be bounded: the features of noise"):
        merger.fold(FILES / "experts/mnist", "mnist")
    merger.processes.count = 2
    with pytest.raises(ValueError, match="on one process only"):
        merger.fold(FILES / "experts/mnist", "mnist")
    assert merger.tasks == []
