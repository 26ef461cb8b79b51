"""What every method promises the merger: settings, repeats, saving, and inputs that stay as they are."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rivals import DEFAULTS, Make, each_default, error_of, every_method, float_tower, passes_over, states_of
from tiny import Tensors, assert_same, copied, randn, tuned
from torch import nn

from safemerge_pl.callbacks import MergeCallback
from safemerge_pl.folding import engine, stacks
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import (
    NUFILT,
    OPCM,
    TSVM,
    IsoC,
    KnOTSTies,
    SafeMerge,
    Stack,
    TaskArithmetic,
    TiesMerging,
    WUDIMerging,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("make", [TaskArithmetic, TiesMerging, WUDIMerging, IsoC, TSVM, OPCM])
def test_large_tensors_outside_of_stacks_are_folded_a_few_rows_at_a_time(
    make: Make, clip: tuple[nn.Module, list[Tensors]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ContinualMerger(clip[0], make())
    expected = states_of(whole, clip[1])
    monkeypatch.setattr(engine, "LARGE_ENTRIES", 1)
    monkeypatch.setattr(stacks, "LARGE_ENTRIES", 20)
    parts = ContinualMerger(clip[0], make())
    for found, state in zip(states_of(parts, clip[1]), expected, strict=True):
        assert_same(found, state)
    for found, report in zip(parts.reports, whole.reports, strict=True):
        for row, other in zip(found.layers, report.layers, strict=True):
            assert row.layer == other.layer
            assert row.task_norm == pytest.approx(other.task_norm)
            assert row.update_norm == pytest.approx(other.update_norm)
            assert row.kept_fraction == pytest.approx(other.kept_fraction)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(OPCM, alpha=1.0), r"`alpha` must be in \[0, 1\), got 1.0: at 1 nothing would be projected"),
        (partial(OPCM, alpha=1.5), r"`alpha` must be in \[0, 1\), got 1.5"),
        (partial(OPCM, alpha=-0.1), r"`alpha` must be in \[0, 1\), got -0.1"),
        (partial(OPCM, alpha=math.nan), r"`alpha` must be in \[0, 1\), got nan"),
        (partial(TiesMerging, top_k=0.0), r"`top_k` must be in \(0, 1\], got 0.0"),
        (partial(TiesMerging, top_k=20), r"`top_k` must be in \(0, 1\], got 20"),
        (partial(TiesMerging, top_k=math.nan), r"`top_k` must be in \(0, 1\], got nan"),
        (partial(KnOTSTies, top_k=0.0), r"`top_k` must be in \(0, 1\], got 0.0"),
        (partial(KnOTSTies, top_k=20), r"`top_k` must be in \(0, 1\], got 20"),
        (partial(KnOTSTies, top_k=-0.2), r"`top_k` must be in \(0, 1\], got -0.2"),
        (partial(WUDIMerging, lr=0.0), r"`lr` must be above 0 and `num_steps` at least 0, got 0.0 and 50"),
        (partial(WUDIMerging, lr=math.nan), r"`lr` must be above 0"),
        (partial(WUDIMerging, num_steps=-1), r"`num_steps` at least 0, got 1e-05 and -1"),
        (partial(NUFILT, null_rank=0), r"`null_rank` must be at least 1, got 0"),
        (partial(NUFILT, recovery_rank=-2), r"`recovery_rank` must be at least 1, got -2"),
        (partial(NUFILT, task_rank=0), r"`task_rank` must be at least 1, got 0"),
        (partial(NUFILT, lr=-1e-3), r"`lr` must be above 0"),
        (partial(NUFILT, num_steps=-1), r"`num_steps` at least 0"),
    ],
)
def test_settings_out_of_range_are_refused_at_construction(make: Make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        partial(OPCM, alpha=0.0),
        partial(TiesMerging, top_k=1.0),
        partial(TiesMerging, top_k=1e-6),
        partial(KnOTSTies, top_k=1.0),
        partial(KnOTSTies, top_k=1e-6),
        partial(WUDIMerging, num_steps=0),
        partial(NUFILT, null_rank=1, recovery_rank=1, task_rank=1, num_steps=0),
    ],
    ids=str,
)
def test_ends_of_the_ranges_are_allowed(make: Make) -> None:
    pretrained = float_tower()
    for state in states_of(ContinualMerger(pretrained, make()), [tuned(pretrained, seed) for seed in (1, 2)]):
        assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_defaults_are_those_of_the_paper_for_eight_tasks() -> None:
    assert {name: make().settings() for name, make in DEFAULTS.items() if name != "nufilt"} == {
        "task_arithmetic": {"scaling": 0.3},
        "naive": {"scaling": 1.0},
        "ties": {"scaling": 0.3, "top_k": 0.2},
        "wudi": {"lr": 1e-5, "num_steps": 50},
        "iso_c": {"scaling": 1.0, "inflate": False},
        "knots": {"scaling": 0.3, "top_k": 0.2, "scale_before_ties": False, "min_singular_value": 1e-4},
        "tsv_m": {"scaling": 1.0},
        "opcm": {"alpha": 0.5, "zero_diagonal": False},
    }
    assert NUFILT().settings() == {
        "null_rank": 128,
        "recovery_rank": 64,
        "task_rank": 8,
        "num_steps": 50,
        "lr": 1e-3,
        "filter_first": False,
        "seed": 0,
    }


@every_method
def test_a_method_is_rebuilt_from_its_settings_even_after_folds(make: Make) -> None:
    pretrained, method = float_tower(), make()
    before = method.settings()
    states_of(ContinualMerger(pretrained, method), [tuned(pretrained, seed) for seed in (1, 2)])
    assert method.settings() == before
    rebuilt: Any = type(method)
    assert rebuilt(**method.settings()) == make()


@every_method
def test_the_callback_takes_every_method(make: Make) -> None:
    method = make()
    callback = MergeCallback(method)
    assert callback.method is method
    assert callback.tasks == []


def test_labels_are_distinct() -> None:
    labels = [make().label for make in DEFAULTS.values()] + [SafeMerge.label]
    assert len(set(labels)) == len(labels) == 10


@each_default
def test_only_opcm_keeps_state(make: Make) -> None:
    method = make()
    if isinstance(method, OPCM):
        other = OPCM()
        other.load_state_dict({"lambda": 2.5, "mean_norm": 0.25, "count": 3})
        assert other.state_dict() == {"lambda": 2.5, "mean_norm": 0.25, "count": 3}
        return
    assert method.state_dict() == {}
    with pytest.raises(ValueError, match=r"keeps no state, got the keys \['count'\]"):
        method.load_state_dict({"count": 3})


@every_method
def test_repeats_are_identical_and_inputs_unchanged(make: Make) -> None:
    pretrained = float_tower()
    stream = [tuned(pretrained, seed) for seed in (1, 2, 3)]
    before = [copied(state) for state in (pretrained, *stream)]
    random_state = torch.get_rng_state()
    once = states_of(ContinualMerger(pretrained, make()), stream)
    assert torch.equal(torch.get_rng_state(), random_state)
    torch.manual_seed(12345)
    again = states_of(ContinualMerger(pretrained, make()), stream)
    torch.set_rng_state(random_state)
    for left, right in zip((*once, pretrained, *stream), (*again, *before), strict=True):
        assert_same(left, right)


@each_default
@pytest.mark.parametrize("index", [1, 2])
def test_a_stack_is_not_changed_and_its_tensors_are_not_handed_on(index: int, make: Make) -> None:
    pretrained = randn(2, 6, 4)
    merged = pretrained if index == 1 else pretrained + 0.1 * randn(2, 6, 4, seed=1)
    parts = (pretrained, merged.clone(), pretrained + 0.1 * randn(2, 6, 4, seed=2))
    stack = Stack(("a", "b"), index, *parts)
    method, before = make(), [part.clone() for part in parts]
    method.prepare(index, passes_over([stack]))
    folds = [method.fold_stack, *([method.fold_rest] if method.merges_rest else [])]
    for fold in folds:
        result = fold(stack).merged
        result.add_(1.0)
        assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))


@every_method
def test_order_of_the_dictionaries_does_not_matter(make: Make) -> None:
    pretrained = float_tower()
    stream = [tuned(pretrained, seed) for seed in (1, 2, 3)]
    expected = states_of(ContinualMerger(pretrained, make()), stream)
    turned = [dict(reversed(theta.items())) for theta in stream]
    for left, right in zip(states_of(ContinualMerger(pretrained, make()), turned), expected, strict=True):
        assert_same(left, right)
    other = states_of(ContinualMerger(dict(reversed(pretrained.items())), make()), stream)
    floats = {name: tensor for name, tensor in pretrained.items() if tensor.is_floating_point()}
    assert error_of(other, [{name: state[name].double() for name in floats} for state in expected], floats) < 1e-5


@every_method
def test_saved_and_continued_is_bit_identical(make: Make, tmp_path: Path) -> None:
    """OPCM has to find its lambda, mean and count again."""
    pretrained = float_tower()
    stream = [tuned(pretrained, seed, scale) for seed, scale in ((1, 0.01), (2, 0.03), (3, 0.02), (4, 0.01))]
    whole = ContinualMerger(pretrained, make())
    states_of(whole, stream)
    merger = ContinualMerger(pretrained, make())
    for index, theta in enumerate(stream):
        if index:
            merger.save(tmp_path / str(index))
            given = make() if index == 2 else None  # else rebuilt from the saved settings
            merger = ContinualMerger.load(tmp_path / str(index), pretrained, method=given)
        merger.fold(theta, f"task{index}")
    assert_same(merger.merged, whole.merged)
    assert merger.method == whole.method
    assert merger.method.state_dict() == whole.method.state_dict()
    assert [report.merged for report in merger.reports] == [report.merged for report in whole.reports]


@pytest.mark.parametrize(("name", "steps"), [("wudi", 50), ("nufilt", 12)])
def test_inner_optimisations_report_falling_losses(name: str, steps: int) -> None:
    pretrained = float_tower()
    merger = ContinualMerger(pretrained, DEFAULTS[name]())
    first, second = (merger.fold(tuned(pretrained, seed, 0.1), f"task{seed}") for seed in (1, 2))
    assert first.losses == ()
    assert len(second.losses) == steps + 1
    assert second.losses[-1] < second.losses[0]
    rows = {row.layer: row for row in second.layers}
    assert rows["vision.0.q"].loss_first is not None
    assert sum(row.loss_first or 0.0 for row in rows.values()) == pytest.approx(second.losses[0], rel=1e-5)
