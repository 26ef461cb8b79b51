"""The rows of the pretrained model and of the experts."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small import TASKS
from streams import CountingProgress, assert_same_weights, direct

from safemerge_pl.callbacks import ReferenceRows
from safemerge_pl.module import ContinualMergeModule

Make = Callable[..., Any]


def test_reference_rows_are_right_and_leave_no_trace(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    """Pretrained on everything; each expert on its own task, its control accuracies averaged."""
    rows, bar = ReferenceRows(), CountingProgress()
    data = small_data()
    make_trainer(merge_callback(), rows, bar, enable_progress_bar=True).fit(module, data)
    assert bar.bars == [("pretrained model and experts", 30, 30)]  # 10 sets in three batches each
    assert_same_weights(module, direct(TASKS))
    zero_shot = ContinualMergeModule()
    make_trainer().validate(zero_shot, small_data(), verbose=False)
    assert rows.rows["pretrained"]["accuracies"] == {
        key: value for key, value in zero_shot.last_scores.items() if key not in ("ACC", "Gen", "H")
    }
    individual = rows.rows["individual"]
    assert individual["ACC"] == pytest.approx(sum(individual["accuracies"][task] for task in TASKS) / 3)
    assert individual["accuracies"]["mnist"] > rows.rows["pretrained"]["accuracies"]["mnist"] + 0.3


def test_published_scores_that_nobody_knows_are_not_asserted(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    rows = ReferenceRows(assert_scores=0.01)
    with pytest.raises(MisconfigurationException, match="SmallZoo knows no published scores"):
        make_trainer(merge_callback(), rows).fit(module, small_data())
    assert rows.rows == {}
