"""An incoming model is matched once; what must not differ is refused, what may is said."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fitting import notes, refusal, tower_at
from safetensors.torch import save_file
from tiny import (
    FC1,
    Add,
    as_file,
    folded,
    fresh,
    only_weights,
    refused,
    tower,
    tuned,
)
from torch import Tensor

from safemerge_pl.checkpoints import Checkpoint, CheckpointError, match_names, open_checkpoint
from safemerge_pl.checkpoints.fit import fit
from safemerge_pl.merger import ContinualMerger

# matched once


class Calls:
    """Counts the searches for names in every module that can make one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0

        def counted(wanted: Sequence[str], checkpoint: Checkpoint, *beside: Checkpoint) -> dict[str, str]:
            self.count += 1
            return match_names(wanted, checkpoint, *beside)

        for name, module in list(sys.modules.items()):
            if name.startswith("safemerge_pl") and getattr(module, "match_names", None) is match_names:
                monkeypatch.setattr(module, "match_names", counted)


@pytest.mark.parametrize("prefix", ["", "module.", "vision_model."])
def test_a_fold_matches_names_once(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    merger = ContinualMerger(tiny.tower(), Add())
    calls = Calls(monkeypatch)
    merger.fold(tiny.renamed(tiny.tuned(tiny.tower(), 1), "", prefix), "task1")
    assert calls.count == 1


def test_a_check_and_the_fold_after_it_match_names_once(monkeypatch: pytest.MonkeyPatch) -> None:
    merger, incoming = ContinualMerger(tiny.tower(), Add()), tiny.tuned(tiny.tower(), 1)
    calls = Calls(monkeypatch)
    merger.fold(merger.check(incoming, "task1", values=False), "task1")
    assert calls.count == 1
    assert merger.fold(incoming, "task2").incoming == merger.reports[0].incoming


def test_what_was_fitted_to_one_model_is_matched_anew_for_another() -> None:
    base = open_checkpoint(tiny.tower())
    other = tiny.renamed(tiny.tower(), "", "vision_model.")
    fitted = fit(base, tiny.only_weights(base), open_checkpoint(tiny.tuned(tiny.tower(), 1)))
    assert fit(base, tiny.only_weights(base), fitted) is fitted
    assert fit(base, tiny.only_weights(base)[:3], fitted) is not fitted
    merger, expected = ContinualMerger(other, Add()), ContinualMerger(base, Add())
    merger.fold(fitted, "a")
    expected.fold(fitted, "a")
    assert merger.fingerprint() == expected.fingerprint()


def test_another_size_that_one_merge_takes_is_still_refused_by_another() -> None:
    """What was fitted with the pretrained rows does not get past a merge that asks for an error."""
    base = open_checkpoint(tower_at(8))
    fitted = ContinualMerger(base, Add(), on_mismatch="pretrained").check(tower_at(12, seed=1), "a")
    assert fitted.notes
    strict = ContinualMerger(base, Add())
    with pytest.raises(CheckpointError, match="image size"):
        strict.fold(fitted, "a")


# what may differ


def test_a_partitioned_checkpoint_is_called_one() -> None:
    """ZeRO-3 leaves empty tensors behind."""
    message = refusal(ContinualMerger(tiny.tower(), Add()), tiny.tower() | {tiny.FC1: torch.empty(0)})
    assert "has shape (0,)" in message
    assert "partitioned (ZeRO-3, FSDP)" in message


def test_a_tensor_that_the_index_does_not_list_is_noted(tmp_path: Path) -> None:
    """Read, and said."""
    from safetensors.torch import save_file

    tensors = tiny.tower()
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    listed = {name: "model-00001-of-00001.safetensors" for name in tensors if name != "pre_layrnorm.weight"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    assert any(
        "hold 1 tensors that it does not list, first `pre_layrnorm.weight`" in note for note in notes(tensors, folder)
    )
    assert any("`pre_layrnorm.weight`" in note for note in notes(folder, tiny.tuned(tensors, 1)))


def test_the_file_that_is_passed_over_is_noted(tmp_path: Path) -> None:
    incoming = tiny.folder_of(tmp_path / "both", tiny.tuned(tiny.tower(), 1))
    torch.save(tiny.tower(), incoming / "pytorch_model.bin")
    (note,) = notes(tiny.tower(), incoming)
    assert note == f"{incoming} holds model.safetensors, which is read, and pytorch_model.bin, which is not"


def test_notes_do_not_pile_up_on_a_checkpoint_that_is_used_twice() -> None:
    incoming = open_checkpoint(tiny.tuned(tiny.tower(), 1) | {"head": torch.zeros(3)})
    merger = ContinualMerger(tiny.tower() | {"head": torch.zeros(2)}, Add())
    merger.check(incoming, "task1")
    assert len(merger.fold(incoming, "task1").notes) == 1


# what must not differ


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_and_inf_are_named_with_file_tensor_and_count(bad: float, dtype: torch.dtype, tmp_path: Path) -> None:
    """SVD would raise for NaN and say nothing of Inf."""
    incoming = tuned(tower(dtype=dtype), 1)
    incoming[FC1][0, :3] = bad
    incoming["pre_layrnorm.weight"][0] = bad  # not merged: no obstacle
    save_file(incoming, tmp_path / "expert.safetensors")
    message = refused(folded(1), tmp_path / "expert.safetensors")
    assert f"{tmp_path / 'expert.safetensors'}: `{FC1}` has 3 NaN or Inf among 128 values" in message


def test_nan_in_what_is_not_merged_is_no_obstacle() -> None:
    """Only what is merged is looked at."""
    incoming = tuned(tower(), 1)
    incoming["pre_layrnorm.weight"][0] = float("nan")
    merger = fresh()
    merger.fold(incoming, "task1")
    assert merger.fingerprint() == folded(1).fingerprint()


@pytest.mark.parametrize("shape", [(15, 8), (16, 9), (8, 16), (1, 16, 8), (128,), (0,)])
def test_another_shape_is_refused_with_both(shape: tuple[int, ...]) -> None:
    message = refused(folded(1), tuned(tower(), 2) | {FC1: torch.zeros(shape)})
    assert f"`{FC1}` has shape {shape}" in message
    assert "(16, 8)" in message


def test_another_model_size_is_refused() -> None:
    assert "has shape (12, 12), the pretrained model's" in refused(folded(1), tower(width=12))


def test_a_missing_tensor_is_refused() -> None:
    incoming = tuned(tower(), 2)
    del incoming[FC1]
    assert f"lacks 1 of 10 tensors to merge, first `{FC1}`" in refused(folded(1), incoming)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("stored", ["memory", "file"])
def test_quantised_weights_are_refused(dtype: torch.dtype, stored: str, tmp_path: Path) -> None:
    incoming: Any = tuned(tower(), 2) | {FC1: tower()[FC1].to(dtype)}
    if stored == "file":
        incoming = as_file(incoming, tmp_path / "model")
    message = refused(folded(1), incoming)
    assert f"`{FC1}`" in message
    assert "float32, bfloat16 or float16" in message


@pytest.mark.parametrize("side", ["pretrained", "incoming"])
def test_weights_without_values_are_refused_by_name(side: str) -> None:
    """A model that was only half loaded."""
    on_meta: dict[str, Tensor] = tower() | {FC1: torch.zeros(16, 8, device="meta")}
    if side == "pretrained":
        with pytest.raises(CheckpointError, match=re.escape(FC1)):
            ContinualMerger(on_meta)
    else:
        assert FC1 in refused(folded(1), on_meta)


def test_a_dry_check_reads_headers_only_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merger = folded(1)
    file = as_file(tuned(tower(), 2), tmp_path / "good")
    bad = as_file(tuned(tower(), 2) | {FC1: torch.zeros(1, 1)}, tmp_path / "bad")
    before = merger.fingerprint(), merger.tasks
    tiny.refuse_to_read(monkeypatch)
    fitted = merger.check(file, "new", values=False)
    assert fitted.names == {name: name for name in only_weights(tower())}
    with pytest.raises(CheckpointError, match="has shape"):
        merger.check(bad, "new", values=False)
    with pytest.raises(AssertionError, match="a tensor was read"):
        merger.check(file, "new")
    assert (merger.fingerprint(), merger.tasks) == before
