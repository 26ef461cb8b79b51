"""What a method merges of a model, and what that costs."""

from pathlib import Path

import pytest
import tiny
import torch
from tiny import (
    FC1,
    Add,
    as_file,
    folded,
    fresh,
    only_weights,
    tower,
    tuned,
)

from safemerge_pl.checkpoints import open_checkpoint
from safemerge_pl.folding.selection import plan_merge
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import MergeMethod, TaskArithmetic


def test_one_layer_of_a_model_can_be_merged_alone() -> None:
    base = tower()
    merger = ContinualMerger(base, Add(), layers=[FC1])
    incoming = tuned(base, 1)
    merger.fold(incoming, "a")
    merged = merger.merged
    assert [name for name in base if not torch.equal(merged[name], base[name])] == [FC1]


def test_only_the_vision_tower_is_taken_from_two_tower_models() -> None:
    """A changed text tower and logit scale stay out."""
    base = tiny.hf_clip().state_dict()
    incoming = tuned(base, 1)
    merger = fresh(base)
    merger.fold(incoming, "a")
    changed = {name for name, tensor in merger.merged.items() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in only_weights(base) if name.startswith("vision_model.")}


def test_a_head_of_the_task_is_left_out() -> None:
    """Private to a task, of another size each time."""
    merger = fresh()
    merger.fold(tuned(tower(), 1) | {"classifier.weight": tiny.randn(10, 8)}, "task1")
    merger.fold(tuned(tower(), 2) | {"classifier.weight": tiny.randn(43, 8)}, "task2")
    assert merger.fingerprint() == folded(1, 2).fingerprint()
    assert "classifier.weight" not in merger.merged


def test_a_plan_is_reckoned_from_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten matrices of which eight are 8 by 8 and two 16 by 8."""
    tensors = tower()
    file = as_file(tensors, tmp_path / "model")
    tiny.refuse_to_read(monkeypatch)
    plan = plan_merge(open_checkpoint(file), Add())
    assert sorted(plan.parameters) == sorted(only_weights(tensors))
    assert plan.units == plan.layers
    assert (plan.others, plan.aliases, plan.notes) == ([], {}, ())
    assert plan.entries == 8 * 64 + 2 * 128
    assert plan.total == sum(tensor.numel() for tensor in tensors.values())
    assert plan.memory == 4 * (3 * plan.entries + 8 * 8 * 64)


def test_a_fused_parameter_is_named_once_and_counted_whole() -> None:
    plan = plan_merge(open_checkpoint({"resblocks.0.attn.in_proj_weight": torch.zeros(24, 8)}), Add())
    assert [unit.name for unit in plan.units] == ["vision.0.q", "vision.0.k", "vision.0.v"]
    assert plan.parameters == ["resblocks.0.attn.in_proj_weight"]
    assert plan.entries == plan.total == 192


def test_tied_tensors_are_merged_under_their_first_name() -> None:
    model = tiny.hf_gpt2()
    plan = plan_merge(open_checkpoint(model), TaskArithmetic())
    assert plan.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert "transformer.wte.weight" in plan.parameters
    assert "lm_head.weight" not in plan.parameters


@pytest.mark.parametrize(("method", "layers"), [(TaskArithmetic(), None), (Add(), ["*q_proj.weight"])])
def test_what_is_chosen_on_purpose_needs_no_note(method: MergeMethod, layers: list[str] | None) -> None:
    """A method that merges everything passes nothing over, and patterns say what is wanted."""
    tensors = {f"layers.0.{part}.weight": torch.ones(2, 2) for part in ("self_attn.q_proj", "mixer.in_proj")}
    (note,) = plan_merge(open_checkpoint(tensors), Add()).notes
    assert "first `layers.0.mixer.in_proj.weight`" in note
    assert plan_merge(open_checkpoint(tensors), method, layers).notes == ()


@pytest.mark.parametrize("patterns", [["*nothing*"], ["*.fc1.weight", "*nothing*"]])
def test_a_pattern_that_selects_nothing_is_an_error_where_no_matrix_is_special(patterns: list[str]) -> None:
    """Task arithmetic has no stacks, so nobody else looks at the patterns."""
    with pytest.raises(ValueError, match=r"`layers` pattern '\*nothing\*' matches none of the \d+ parameters"):
        plan_merge(open_checkpoint(tiny.tower()), TaskArithmetic(), patterns)


def test_a_model_without_floating_point_tensors_is_no_model() -> None:
    with pytest.raises(ValueError, match="a mapping in memory holds no floating-point tensor"):
        plan_merge(open_checkpoint({"position_ids": torch.arange(3)}), TaskArithmetic())
