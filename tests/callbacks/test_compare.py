"""Other methods on the models of a stream: folded in its order, scored at the end, shown in every report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from event_files import scalars
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import TensorBoardLogger
from small import TASKS, tower
from streams import CountingProgress

from safemerge_pl.callbacks import ComparedMethod, MergeCallback, MethodComparison, StreamReport
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import SafeShare, TaskArithmetic
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.zoo import FILES

Make = Callable[..., Any]


def share() -> SafeShare:
    return SafeShare(scoring_rank=21, shared_rank=32)


def test_each_method_ends_as_a_stream_of_its_own(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    methods = [ComparedMethod(share()), ComparedMethod(TaskArithmetic(), 0.01, "bounded sum", layers="*mlp.fc1.weight")]
    compare, report, bar = MethodComparison(methods), StreamReport(), CountingProgress()
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    callbacks = [merge_callback(), compare, report, bar]
    make_trainer(*callbacks, logger=logger, enable_progress_bar=True).fit(module, small_data())
    assert bar.bars == [("SAFE-Share, bound 0.035", 12, 12), ("bounded sum", 12, 12)]
    merged = tower(module)
    alone = ContinualMergeModule()
    make_trainer(MergeCallback(share())).fit(alone, small_data())
    row = compare.rows["SAFE-Share, bound 0.035"]
    assert row["merged"] == fingerprint_of(share(), 0.035)
    assert row["accuracies"] == {k: v for k, v in alone.last_scores.items() if k not in ("ACC", "Gen", "H", "BWT")}
    assert (row["ACC"], row["H"]) == (pytest.approx(alone.last_scores["ACC"]), pytest.approx(alone.last_scores["H"]))
    assert compare.rows["bounded sum"]["merged"] == fingerprint_of(TaskArithmetic(), 0.01, "*mlp.fc1.weight")
    only = ContinualMergeModule()
    make_trainer(merge_callback()).fit(only, small_data())
    for name, tensor in tower(only).items():  # the stream's own merge is what it would be alone
        assert torch.equal(merged[name], tensor)
    folder = Path(logger.log_dir)
    content = json.loads((folder / "report.json").read_text())
    assert list(content["compared"]) == ["SAFE-Share, bound 0.035", "bounded sum"]
    assert "| | SAFE-Merge | SAFE-Share, bound 0.035 | bounded sum |" in (folder / "report.md").read_text()
    assert scalars(folder)["compare/bounded sum/ACC"] == [(3, pytest.approx(compare.rows["bounded sum"]["ACC"]))]


def fingerprint_of(method: Any, bound: float | None, layers: str | None = None) -> str:
    module = ContinualMergeModule()
    module.configure_model()
    merger = ContinualMerger(module.backbone.vision_model, method, max_response=bound, layers=layers)  # type: ignore[arg-type]
    for task in TASKS:
        merger.fold(FILES / "experts" / task, task)
    return merger.fingerprint()


def test_a_resumed_run_measures_only_what_is_missing(
    module: ContinualMergeModule,
    small_data: Make,
    make_trainer: Make,
    merge_callback: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare = MethodComparison([ComparedMethod(TaskArithmetic())])
    trainer = make_trainer(merge_callback(), compare)
    trainer.fit(module, small_data())
    state = compare.state_dict()
    again = MethodComparison([ComparedMethod(TaskArithmetic()), ComparedMethod(share())])
    again.load_state_dict(state)
    measured: list[str] = []
    real = MethodComparison._measure

    def counting(self: Any, entry: ComparedMethod, *args: Any) -> Any:
        measured.append(entry.label)
        return real(self, entry, *args)

    monkeypatch.setattr(MethodComparison, "_measure", counting)
    make_trainer(merge_callback(), again).fit(ContinualMergeModule(), small_data())
    assert measured == ["SAFE-Share, bound 0.035"]
    assert again.rows["Task Arithmetic"] == state["rows"]["Task Arithmetic"]


def test_a_stream_that_was_stopped_early_is_not_compared(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    compare = MethodComparison([ComparedMethod(TaskArithmetic())])
    make_trainer(merge_callback(), compare, max_epochs=2).fit(module, small_data())
    assert compare.rows == {}


def test_two_methods_of_one_label_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="two methods have one label"):
        MethodComparison([ComparedMethod(TaskArithmetic()), ComparedMethod(TaskArithmetic(0.1))])


def test_a_method_that_cannot_merge_the_model_is_named(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    compare = MethodComparison([ComparedMethod(SafeShare())])  # its ranks are for a wider model
    merge = merge_callback()
    with pytest.raises(MisconfigurationException, match=r"`compare`: SAFE-Share, bound 0.035: .*only 128 input"):
        make_trainer(merge, compare).fit(module, small_data())
    strange = MethodComparison([ComparedMethod(TaskArithmetic(), layers=["*fc1*", "fc3"])])
    with pytest.raises(MisconfigurationException, match=r"`compare`: Task Arithmetic: `layers` pattern 'fc3' matches"):
        make_trainer(merge_callback(), strange).fit(module, small_data())
    assert merge.tasks == []  # before the long part
