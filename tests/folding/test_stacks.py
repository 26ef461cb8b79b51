"""The plan of stacks; matrices into a stack, and results out of it."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
import torch

from safemerge_pl.architectures.layers import MergeLayer
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.folding import stacks
from safemerge_pl.folding.report import LayerReport
from safemerge_pl.folding.stacks import concatenate, copy_if_shared, fold_rows, guard, plan_stacks, stack_matrices
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import MergeMethod, SafeMerge, Stack, StackResult, TaskArithmetic


def make_layers(shapes: list[tuple[int, int]], prefix: str = "a") -> list[MergeLayer]:
    return [MergeLayer(f"{prefix}.{i}", f"{prefix}.{i}.weight", shape) for i, shape in enumerate(shapes)]


def test_a_plan_holds_every_layer_once_in_stacks_of_one_shape_and_bounded_size() -> None:
    layers = make_layers([(4, 4), (8, 4), (4, 4), (4, 8), (4, 4), (8, 4)])
    plan = plan_stacks(layers, max_entries=32)
    assert sorted(layer.name for stack in plan for layer in stack) == [layer.name for layer in layers]
    assert [[layer.name for layer in stack] for stack in plan] == [["a.0", "a.2"], ["a.4"], ["a.1"], ["a.5"], ["a.3"]]


def test_a_layer_above_the_bound_is_a_stack_of_its_own() -> None:
    assert [len(stack) for stack in plan_stacks(make_layers([(8, 8), (8, 8)]), max_entries=1)] == [1, 1]


def test_the_plan_depends_on_shapes_only() -> None:
    layers = make_layers([(4, 4), (8, 4), (4, 4), (4, 4)])
    others = [
        replace(layer, name=f"z.{i}", parameter="p", rows=(0, layer.shape[0]), transposed=True)
        for i, layer in enumerate(layers)
    ]
    plan, other_plan = plan_stacks(layers, max_entries=32), plan_stacks(others, max_entries=32)
    assert [[layers.index(layer) for layer in stack] for stack in plan] == [
        [others.index(layer) for layer in stack] for stack in other_plan
    ]


def stack_of(count: int, seed: int = 0) -> Stack:
    base, merged, incoming = (tiny.randn(count, 4, 3, seed=seed + i) for i in range(3))
    return Stack(tuple(f"layer{i}" for i in range(count)), 1, base, merged, incoming)


def test_a_single_matrix_is_not_copied() -> None:
    matrix = torch.ones(2, 3)
    assert stack_matrices([matrix]).data_ptr() == matrix.data_ptr()
    several = stack_matrices([matrix.half(), 2 * matrix.double()])
    assert several.dtype == torch.float32
    assert several.mean((1, 2)).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("part", ["pretrained", "merged", "incoming", "cache"])
def test_a_result_in_the_memory_of_its_inputs_is_copied(part: str) -> None:
    stack = stack_of(2)
    stack.cache["basis"] = tiny.randn(2, 4, 3, seed=9)
    given = stack.cache["basis"] if part == "cache" else getattr(stack, part)
    found = copy_if_shared(StackResult(given[:, 1:]), stack).merged
    assert torch.equal(found, given[:, 1:])
    given.zero_()
    assert found.any()


def test_a_result_of_its_own_is_not_copied() -> None:
    result = StackResult(torch.ones(2, 4, 3))
    assert copy_if_shared(result, stack_of(2)) is result


def row(name: str) -> LayerReport:
    return LayerReport(name, 1.0, None, None, 0.0, 0.0)


@pytest.mark.parametrize("given", [True, False])
def test_parts_are_put_together_in_order(given: bool) -> None:
    parts = [
        (
            StackResult(
                torch.full((count, 2, 2), float(count)),
                torch.full((count,), 0.5) if given else None,
                torch.full((3, count), float(count)) if given else None,
                1.5,
            ),
            [row(f"{count}.{i}") for i in range(count)],
        )
        for count in (2, 1)
    ]
    whole, rows = concatenate(parts)
    assert whole.merged[:, 0, 0].tolist() == [2.0, 2.0, 1.0]
    assert [each.layer for each in rows] == ["2.0", "2.1", "1.0"]
    assert whole.solve_seconds == 3.0
    if given:
        assert whole.kept_fraction is not None
        assert whole.kept_fraction.tolist() == [0.5] * 3
        assert whole.losses is not None
        assert whole.losses.tolist() == [[2.0, 2.0, 1.0]] * 3
    else:
        assert (whole.kept_fraction, whole.losses) == (None, None)


@pytest.mark.parametrize("shape", [(7, 3), (5,), (1, 9)])
def test_rows_at_a_time_give_the_tensor_at_once(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of two rows, and a last one of one."""
    tensors = [tiny.randn(*shape, seed=seed) for seed in range(3)]
    method = TaskArithmetic(scaling=0.5)
    expected, (whole,) = fold_rows(method.fold_rest, "x", 1, tensors, torch.device("cpu"))
    monkeypatch.setattr(stacks, "LARGE_ENTRIES", 6)
    found, (part,) = fold_rows(method.fold_rest, "x", 1, tensors, torch.device("cpu"))
    assert torch.equal(found.merged, expected.merged)
    assert found.merged.shape == (1, *shape)
    assert part.task_norm == pytest.approx(whole.task_norm)
    assert part.update_norm == pytest.approx(whole.update_norm)


@dataclass
class InPlace(MergeMethod):
    """Somebody else's method, which saves memory where it should not."""

    label = "In place"
    merges_rest = True
    field: str = "merged"
    fails: bool = False

    def fold_stack(self, stack: Stack) -> StackResult:
        getattr(stack, self.field).mul_(2)
        if self.fails:
            raise RuntimeError("in the middle")
        return StackResult(stack.merged + stack.task_vector)

    fold_rest = fold_stack


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("field", ["pretrained", "merged", "incoming"])
def test_a_method_that_changes_its_inputs_changes_no_model(field: str, fails: bool) -> None:
    """A stack of one matrix is the model's own memory; a second fold starts from what was merged in the first."""
    base = {"layers.0.mlp.fc1.weight": tiny.randn(8, 4), "layers.0.mlp.fc1.bias": tiny.randn(8)}
    merger = ContinualMerger(base, tiny.Add())
    merger.fold(tiny.tuned(base, 1), "one")
    before, own = tiny.copied(merger.merged), tiny.copied(merger.pretrained)
    expert = tiny.tuned(base, 2)
    kept = tiny.copied(expert)
    merger.method = InPlace(field, fails)
    if fails:
        with pytest.raises(CheckpointError, match="in the middle"):
            merger.fold(expert, "two")
        tiny.assert_same(merger.merged, before)
    else:
        report = merger.fold(expert, "two")
        length = (expert["layers.0.mlp.fc1.weight"] - base["layers.0.mlp.fc1.weight"]).norm()
        assert report.layers[0].task_norm == pytest.approx(float(length), rel=1e-5)
    tiny.assert_same(tiny.copied(merger.pretrained), own)
    tiny.assert_same(expert, kept)


@pytest.mark.parametrize("result", [None, torch.ones(1, 8, 4), StackResult(None)])  # type: ignore[arg-type]
def test_what_is_no_result_is_named(result: Any) -> None:
    class Wrong(tiny.Add):
        def fold_stack(self, stack: Stack) -> StackResult:
            return result  # type: ignore[no-any-return]

    base = {"layers.0.mlp.fc1.weight": tiny.randn(8, 4)}
    with pytest.raises(CheckpointError, match=r"Wrong\.fold_stack gave \w+, where a StackResult"):
        ContinualMerger(base, Wrong()).fold(tiny.tuned(base, 1), "task1")


def test_our_own_methods_get_the_stack_as_it_is() -> None:
    method = SafeMerge()
    assert guard(method, method.fold_stack) == method.fold_stack
    assert guard(tiny.Add(), tiny.Add().fold_stack) != tiny.Add().fold_stack
