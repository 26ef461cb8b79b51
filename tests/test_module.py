"""The module of a stream: its matrix, its checkpoints, what it refuses to score."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small import TASKS, tower
from streams import assert_same_weights, checkpoint_after_two, direct

from safemerge_pl.callbacks import ReferenceRows, StreamReport
from safemerge_pl.module import ContinualMergeModule

Make = Callable[..., Any]


def test_sanity_check_enters_nothing(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    """Lightning's sanity check scores weights before any merge: its row is no row of the matrix."""
    make_trainer(merge_callback(), num_sanity_val_steps=2, max_epochs=1).fit(module, small_data())
    assert module.matrix is not None
    assert module.matrix.steps == 1


def test_a_trainer_that_asks_for_the_sets_only_once_is_refused_before_the_first_merge(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    trainer = make_trainer(merge_callback(), reload_dataloaders_every_n_epochs=0)
    with pytest.raises(MisconfigurationException, match="`reload_dataloaders_every_n_epochs=1`"):
        trainer.fit(module, small_data())
    assert module.merged_tasks == []


def test_resume_with_a_longer_stream_and_without_the_callback(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """A stream may grow at its end; without the callback it cannot go on."""
    path = checkpoint_after_two(
        module, small_data(TASKS[:2]), make_trainer(merge_callback(), max_epochs=2), tmp_path / "two.ckpt"
    )
    longer = ContinualMergeModule()
    make_trainer(merge_callback()).fit(longer, small_data(), ckpt_path=path)
    assert_same_weights(longer, direct(TASKS))
    assert longer.matrix is not None
    assert torch.equal(longer.matrix.accuracy.isnan(), torch.ones(3, 3).triu(1).bool())
    with (
        pytest.warns(UserWarning, match="Be aware that when using `ckpt_path`"),
        pytest.raises(MisconfigurationException, match="no MergeCallback to continue"),
    ):
        make_trainer().fit(ContinualMergeModule(), small_data(), ckpt_path=path)


def test_checkpoint_is_plain_small_and_rebuilds_the_module(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """It loads with ``weights_only``, holds the weights once, and gives module and matrix without a trainer."""
    path = checkpoint_after_two(
        module, small_data(), make_trainer(merge_callback(), ReferenceRows(), StreamReport()), tmp_path / "x.ckpt"
    )
    torch.load(path, weights_only=True)
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    assert path.stat().st_size <= 1.2 * weights
    again = ContinualMergeModule.load_from_checkpoint(path)
    assert again.merged_tasks == TASKS
    assert all(torch.equal(tensor, tower(module)[name]) for name, tensor in tower(again).items())
    assert again.matrix is not None
    assert again.matrix.compute()["ACC"] == module.matrix.compute()["ACC"]  # type: ignore[union-attr]


@pytest.fixture
def skips_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every validation leaves out its first batch."""
    original = ContinualMergeModule.validation_step

    def skip(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx:
            original(self, batch, batch_idx, dataloader_idx)

    monkeypatch.setattr(ContinualMergeModule, "validation_step", skip)


@pytest.mark.usefixtures("skips_first")
def test_a_row_cut_short_is_refused(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    """A validation that saw fewer images must not enter the matrix."""
    with pytest.raises(RuntimeError, match="only 24 of 40 images of 'font_category' were scored"):
        make_trainer(merge_callback()).fit(module, small_data())


def test_broken_weights_stop_the_evaluation(module: ContinualMergeModule, small_data: Make, make_trainer: Make) -> None:
    """NaN logits are no answer."""
    module.configure_model()
    with torch.no_grad():
        module.backbone.vision_model.post_layernorm.weight.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(FloatingPointError, match="logits on 'font_category' hold NaN"):
        make_trainer().validate(module, small_data(), verbose=False)


@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled")
@pytest.mark.parametrize(
    ("limits", "counted"),
    [
        ({"limit_val_batches": 1}, 16),
        ({"limit_val_batches": 2}, 32),
        ({"limit_val_batches": 0.5}, 16),
        ({"limit_val_batches": 1.0}, 40),
        ({"overfit_batches": 1}, 16),
        ({"fast_dev_run": 1}, 16),
    ],
    ids=str,
)
def test_a_limit_counts_batches_or_is_a_share(
    limits: dict[str, Any],
    counted: int,
    module: ContinualMergeModule,
    small_data: Make,
    make_trainer: Make,
    merge_callback: Make,
) -> None:
    """The number 1 is one batch, and 1.0 is all of them."""
    trainer, seen = make_trainer(merge_callback(), max_epochs=1, **limits), []
    original = ContinualMergeModule.validation_step

    def counts(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        seen.append((dataloader_idx, len(batch[1])))
        original(module, batch, batch_idx, dataloader_idx)

    module.validation_step = counts  # type: ignore[method-assign]
    trainer.fit(module, small_data())
    assert sum(size for loader, size in seen if loader == 0) == counted
    assert module.matrix is not None
    assert module.matrix.steps == 1


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_a_limit_of_one_batch_in_the_other_stages(verb: str, small_data: Make, make_trainer: Make) -> None:
    module, name = ContinualMergeModule(), "val" if verb == "validate" else "test"
    getattr(make_trainer(**{f"limit_{name}_batches": 1}), verb)(module, small_data(), verbose=False)
    assert set(module.last_scores) == {*TASKS, "clipart_category", "ACC", "Gen", "H"}


@pytest.mark.usefixtures("skips_first")
def test_the_limit_of_another_stage_excuses_nothing(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make
) -> None:
    with pytest.raises(RuntimeError, match="only 24 of 40 images"):
        make_trainer(limit_test_batches=1).validate(module, small_data(), verbose=False)


@pytest.mark.parametrize("limit", [0, 0.0])
def test_a_stream_without_validation_is_merged_all_the_same(
    limit: float,
    module: ContinualMergeModule,
    small_data: Make,
    make_trainer: Make,
    merge_callback: Make,
    tmp_path: Path,
) -> None:
    merge = merge_callback()
    make_trainer(merge, StreamReport(folder=str(tmp_path / "r")), limit_val_batches=limit).fit(module, small_data())
    assert merge.tasks == TASKS
    assert_same_weights(module, direct(TASKS))
