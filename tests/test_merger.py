"""Folding, whole or not at all: every kind of model, whatever is around it; continuing a saved merge."""

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from tiny import (
    FC1,
    Add,
    Tensors,
    as_file,
    assert_same,
    copied,
    folded,
    fresh,
    only_weights,
    refused,
    renamed,
    tower,
    tuned,
)
from torch import nn

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.folding import engine
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, SafeMerge, Stack, StackResult, TaskArithmetic

# what a fold does


def test_a_fold_adds_to_the_merged_layers_and_leaves_the_rest_exactly_pretrained() -> None:
    """Biases, norms, the second matrix and integer buffers."""
    base = tower(dtype=torch.float16)
    incoming = tuned(base, 1) | {"embeddings.position_ids": torch.arange(5)[None] + 1}
    merger = ContinualMerger(base, Add())
    merger.fold(incoming, "a")
    merged = merger.merged
    assert list(merged) == list(base)
    for name, tensor in base.items():
        expected = incoming[name].float() if name in only_weights(base) else tensor
        if tensor.is_floating_point():
            assert merged[name].dtype == torch.float32
            torch.testing.assert_close(merged[name], expected.float(), rtol=0, atol=1e-7)
        else:
            assert merged[name].dtype == torch.int64
        if name not in only_weights(base):
            assert torch.equal(merged[name], tensor.to(merged[name].dtype))


def test_a_position_table_stored_as_float_stays_as_it_is() -> None:
    """A checkpoint saved wholly in half precision."""
    base = tower() | {"embeddings.position_ids": torch.arange(5.0).half()[None]}
    incoming = tuned(base, 1)
    merger = fresh(base)
    merger.fold(incoming, "a")
    assert merger.merged["embeddings.position_ids"].tolist() == [[0, 1, 2, 3, 4]]


# every kind of model gives one merge


def as_pickle(tensors: Tensors, path: Path) -> Path:
    torch.save({"state_dict": renamed(tensors, "", "model.")}, path.with_suffix(".ckpt"))
    return path.with_suffix(".ckpt")


def as_folder(tensors: Tensors, path: Path) -> Path:
    return tiny.folder_of(path, tensors)


def as_mapping(tensors: Tensors, path: Path) -> Tensors:
    return tensors


def as_parameters(tensors: Tensors, path: Path) -> dict[str, Any]:
    return {name: nn.Parameter(t) if t.is_floating_point() else t for name, t in tensors.items()}


def as_module(tensors: Tensors, path: Path) -> nn.Module:
    module = tiny.hf_vision()
    _, unexpected = module.load_state_dict({n: t for n, t in tensors.items() if t.is_floating_point()}, strict=False)
    assert not unexpected
    return module


@pytest.mark.parametrize("given", [as_file, as_pickle, as_parameters, as_module, as_folder])
@pytest.mark.parametrize("side", ["pretrained", "incoming"])
def test_it_does_not_matter_how_a_model_is_given(
    given: Callable[[Tensors, Path], Any], side: str, tmp_path: Path
) -> None:
    base, incoming = tower(), tuned(tower(), 1)
    expected = fresh(base)
    expected.fold(incoming, "a")
    merger = fresh(given(base, tmp_path / "model") if side == "pretrained" else base)
    merger.fold(given(incoming, tmp_path / "model") if side == "incoming" else incoming, "a")
    assert merger.fingerprint() == expected.fingerprint()


def as_open_clip(tensors: Tensors) -> Tensors:
    """The merged layers of :func:`tiny.tower` as open_clip lays them out."""
    found = {}
    for layer in range(2):
        old, new = f"encoder.layers.{layer}", f"visual.transformer.resblocks.{layer}"
        parts = [tensors[f"{old}.self_attn.{part}_proj.weight"] for part in "qkv"]
        found[f"{new}.attn.in_proj_weight"] = torch.cat(parts)
        found[f"{new}.attn.out_proj.weight"] = tensors[f"{old}.self_attn.out_proj.weight"]
        found[f"{new}.mlp.c_fc.weight"] = tensors[f"{old}.mlp.fc1.weight"]
    return found


def test_a_fused_layout_gives_the_same_merge() -> None:
    """The same weights as transformers and as open_clip store them."""
    base, one, two = tower(), tuned(tower(), 1), tuned(tower(), 2)
    expected = folded(1, 2, pretrained=base)
    merger = fresh(as_open_clip(base))
    merger.fold(as_open_clip(one), "task1")
    merger.fold(as_open_clip(two), "task2")
    assert_same(merger.merged, as_open_clip(expected.merged))
    assert merger.fingerprint() == expected.fingerprint()


def test_a_transposed_layout_gives_the_same_merge() -> None:
    """A square matrix as GPT-2 stores it, and upright."""
    base, tuned_ = tiny.randn(8, 8), tiny.randn(8, 8) + 0.01 * tiny.randn(8, 8, seed=1)
    upright, turned = "layers.0.self_attn.o_proj.weight", "h.0.attn.c_proj.weight"
    beside = {"h.0.mlp.c_fc.weight": tiny.randn(8, 32)}  # tells which way the square one lies
    expected, merger = fresh({upright: base}), fresh({turned: base.T.contiguous(), **beside})
    assert expected.fold({upright: tuned_}, "a").layers[0].layer == "model.0.out"
    merger.fold({turned: tuned_.T.contiguous(), **beside}, "a")
    assert torch.equal(merger.merged[turned].T, expected.merged[upright])
    assert not torch.equal(merger.merged[turned], expected.merged[upright])


def test_the_order_of_tensors_in_a_file_does_not_matter() -> None:
    base, incoming = tower(), tuned(tower(), 1)
    merger = fresh(dict(reversed(base.items())))
    merger.fold(dict(reversed(incoming.items())), "task1")
    assert_same(merger.merged, folded(1).merged)
    assert merger.fingerprint() == folded(1).fingerprint()


def test_the_order_of_tasks_does_matter() -> None:
    """That is why it is recorded."""
    assert folded(1, 2).fingerprint() != folded(2, 1).fingerprint()
    assert folded(2, 1).tasks == ["task2", "task1"]


def test_wrapper_prefixes_on_both_sides_do_not_matter() -> None:
    merger = fresh(renamed(tower(), "", "vision_model."))
    merger.fold(renamed(tuned(tower(), 1), "", "module."), "task1")
    assert merger.fingerprint() == folded(1).fingerprint()
    assert all(name.startswith("vision_model.") for name in merger.merged)


def test_a_scalar_of_another_shape_is_no_obstacle() -> None:
    """`logit_scale` as () and as (1,); it is not merged."""
    merger = fresh(tower() | {"logit_scale": torch.tensor(2.0)})
    merger.fold(tuned(tower(), 1) | {"logit_scale": torch.tensor([3.0])}, "a")
    assert merger.merged["logit_scale"].shape == ()
    assert merger.merged["logit_scale"].item() == 2.0


# dtypes


def test_dtypes_may_be_mixed_and_come_in_any_order() -> None:
    """Everything is merged in float32; only the values that a file holds count."""
    # of few enough bits for each of the formats: no change can hide in the rounding of another entry
    base = {n: t.half() if t.is_floating_point() else t for n, t in tower(dtype=torch.bfloat16).items()}
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    incoming = [
        {n: t.to(kind) if t.is_floating_point() else t for n, t in tuned(tower(), seed).items()}
        for seed, kind in enumerate(kinds)
    ]
    merger, expected = fresh(base), fresh({name: tensor.float() for name, tensor in base.items()})
    for seed, tensors in enumerate(incoming):
        merger.fold(tensors, f"task{seed}")
        expected.fold({name: tensor.float() for name, tensor in tensors.items()}, f"task{seed}")
    assert merger.fingerprint() == expected.fingerprint()
    assert {t.dtype for n, t in merger.merged.items() if n in only_weights(base)} == {torch.float32}


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_the_base_saved_in_fewer_bits_is_no_task(stored: torch.dtype) -> None:
    base = tower()
    merger = folded(1)
    before = merger.fingerprint()
    report = merger.fold({name: t.to(stored) if t.is_floating_point() else t for name, t in base.items()}, "copy")
    assert merger.fingerprint() == before
    assert report.notes == ("its merged layers equal the pretrained model's: nothing was added",)


def test_the_base_saved_in_more_bits_is_no_task() -> None:
    base = tower(dtype=torch.float16)
    report = fresh(base).fold({name: tensor.float() for name, tensor in base.items()}, "copy")
    assert report.notes
    assert not any(row.task_norm for row in report.layers)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_decomposed_and_scored_in_single_precision(stored: torch.dtype) -> None:
    """A change of 1e-4, whose square is nothing in half precision."""
    base = tower(dtype=stored)
    incoming = {
        name: t.float() + 1e-4 * tiny.randn(*t.shape) if t.is_floating_point() else t for name, t in base.items()
    }
    report = fresh(base).fold(incoming, "small")
    assert all(0.4 < row.kept_fraction < 0.6 for row in report.layers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_outside_does_not_matter(dtype: torch.dtype) -> None:
    """Lightning's bf16-true sets it."""
    expected = folded(1, 2).fingerprint()
    base, incoming = tower(), [tuned(tower(), seed) for seed in (1, 2)]
    torch.set_default_dtype(dtype)
    try:
        merger = fresh(base)
        for seed, tensors in enumerate(incoming, 1):
            merger.fold(tensors, f"task{seed}")
        assert merger.fingerprint() == expected
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "low matmul precision": lambda: matmul_precision("medium"),
    "deterministic": lambda: deterministic(),
}


@contextmanager
def matmul_precision(value: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
        assert torch.get_float32_matmul_precision() == value  # the fold puts it back
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("where", SURROUNDINGS)
@pytest.mark.parametrize("part", ["fold", "everything"])
def test_nothing_around_a_fold_changes_a_bit(where: str, part: str) -> None:
    expected = folded(1, 2)
    merger = fresh()
    surroundings = SURROUNDINGS[where]
    with surroundings() if part == "everything" else nullcontext():
        base = tower()
        merger = fresh(base)
        for seed in (1, 2):
            incoming = tuned(base, seed)
            with surroundings() if part == "fold" else nullcontext():
                merger.fold(incoming, f"task{seed}")
    assert_same(merger.merged, expected.merged)
    assert merger.reports[1].losses == expected.reports[1].losses
    parameters = merger.merged_parameters()
    assert not any(tensor.requires_grad or tensor.is_inference() for tensor in parameters.values())


def test_no_global_random_state_is_touched(tmp_path: Path) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    merger = folded(1, 2)
    merger.save(tmp_path / "out")
    ContinualMerger.load(tmp_path / "out", tower())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_the_global_seed_does_not_matter_and_the_own_seed_does() -> None:
    expected = folded(1, 2).fingerprint()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        assert folded(1, 2).fingerprint() == expected
    assert folded(1, 2, seed=1).fingerprint() != expected


# who owns which tensor


@pytest.mark.parametrize("given", [as_parameters, as_module, as_mapping])
def test_inputs_are_never_changed(given: Callable[[Tensors, Path], Any], tmp_path: Path) -> None:
    base, incoming = given(tower(), tmp_path), given(tuned(tower(), 1), tmp_path)
    both = [m.state_dict() if isinstance(m, nn.Module) else m for m in (base, incoming)]
    before = [copied(tensors) for tensors in both]
    merger = fresh(base)
    merger.fold(incoming, "a")
    merger.fold(incoming, "b")
    merger.save(tmp_path / "out")
    for tensors, copies in zip(both, before, strict=True):
        assert_same(copied(tensors), copies)


@pytest.mark.parametrize("kind", ["mapping", "module"])
def test_a_later_change_of_what_was_given_changes_nothing(kind: str, tmp_path: Path) -> None:
    """The module goes on training while its merge continues."""
    base: Any = tiny.hf_vision() if kind == "module" else tower()
    tensors = base.state_dict() if kind == "module" else base
    original = copied(tensors)
    incoming = [tuned(original, seed) for seed in (1, 2)]
    expected = fresh(original)
    for seed, task in enumerate(incoming):
        expected.fold(copied(task), f"t{seed}")
    merger = fresh(base)
    for tensor in tensors.values():
        tensor.data.add_(1)
    for seed, task in enumerate(incoming):
        merger.fold(task, f"t{seed}")
        for tensor in task.values():
            tensor.zero_()
    if kind == "mapping":
        tensors.clear()
    assert_same(merger.merged, expected.merged)
    merger.save(tmp_path / "out")
    assert_same(
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(expected.save(tmp_path / "b") / "model.safetensors"),
    )


def test_training_on_the_merged_weights_does_not_reach_into_the_merger() -> None:
    """`load_state_dict(merged, assign=True)` makes them a module's own."""
    merger = folded(1)
    before = merger.fingerprint()
    for tensor in merger.merged.values():
        tensor.zero_()
    assert merger.fingerprint() == before
    merger.fold(tuned(tower(), 2), "task2")
    assert merger.fingerprint() == folded(1, 2).fingerprint()


# all or nothing


@dataclass
class Breaking(SafeMerge):
    """Raises at one stack; counts stacks in a state of plain values and of tensors that it changes in place."""

    concurrent = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[str] = []
        self.count = torch.zeros(())
        self.calls, self.break_at, self.error = 0, -1, BaseException

    def fold_stack(self, stack: Stack) -> StackResult:
        self.calls += 1
        self.seen += stack.layers
        self.count += 1
        if self.calls == self.break_at:
            raise self.error("injected")
        return super().fold_stack(stack)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.count = state["seen"], state["count"]


def breaking() -> Breaking:
    return Breaking(scoring_rank=4, recovery_rank=3, task_rank=2, num_steps=3)


@pytest.mark.parametrize(
    "error", [RuntimeError, ValueError, FloatingPointError, MemoryError, KeyboardInterrupt, KeyError]
)
@pytest.mark.parametrize("stack", [1, 3, 10])
def test_a_fold_that_fails_midway_changes_nothing(
    error: type[BaseException], stack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folding again gives what an undisturbed fold gives."""
    plan = engine.plan_stacks
    monkeypatch.setattr(engine, "plan_stacks", lambda layers, *size: plan(layers, 64))
    base = tower()
    undisturbed, merger = ContinualMerger(base, breaking()), ContinualMerger(base, breaking())
    for each in (undisturbed, merger):
        each.fold(tuned(base, 1), "one")
    method = merger.method
    assert isinstance(method, Breaking)
    before = (
        merger.fingerprint(),
        merger.tasks,
        list(method.seen),
        method.count.item(),
        json.dumps(merger.state_dict()["reports"]),
    )
    assert len(method.seen) == method.calls == 10
    method.break_at, method.error = method.calls + stack, error
    kind = CheckpointError if issubclass(error, (RuntimeError, ValueError, ArithmeticError)) else error
    with pytest.raises(kind, match="injected") as caught:
        merger.fold(tuned(base, 2), "two")
    if kind is CheckpointError:
        assert re.search(r"^task 'two': layers vision\.\d\.\w+ to vision", str(caught.value))
    after = (
        merger.fingerprint(),
        merger.tasks,
        list(method.seen),
        method.count.item(),
        json.dumps(merger.state_dict()["reports"]),
    )
    assert after == before
    for each in (undisturbed, merger):
        each.fold(tuned(base, 2), "two")
    assert merger.fingerprint() == undisturbed.fingerprint()
    assert method.seen == undisturbed.method.state_dict()["seen"]
    assert method.count.item() == 20


def test_a_large_task_is_folded() -> None:
    base = tower()
    merger = folded(1)
    report = merger.fold({n: 1e4 * t if t.is_floating_point() else t for n, t in tuned(base, 2).items()}, "large")
    assert all(torch.isfinite(tensor).all() for tensor in merger.merged_parameters().values())
    assert 0.4 < report.kept_fraction < 0.6


def test_inf_in_the_pretrained_model_is_refused_at_once(tmp_path: Path) -> None:
    base = tower()
    base[FC1][1, 1] = float("inf")
    folder = tiny.folder_of(tmp_path / "base", base)
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(str(folder))}: `{re.escape(FC1)}` has 1 NaN or Inf among 128"
    ):
        ContinualMerger(folder)


@pytest.mark.parametrize("task", ["task1", "TASK1", "Task1"])
def test_a_task_name_is_used_once_whatever_its_case(task: str) -> None:
    """Two rows of a table would collapse on some file systems."""
    assert f"a task of the name '{task}' is already merged" in refused(folded(1), tuned(tower(), 2), task)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("stored", ["memory", "file"])
def test_a_quantised_pretrained_model_is_refused(dtype: torch.dtype, stored: str, tmp_path: Path) -> None:
    """The rounding of a quantiser is no task."""
    base: Any = tower() | {FC1: tower()[FC1].to(dtype)}
    if stored == "file":
        base = as_file(base, tmp_path / "model")
    with pytest.raises(CheckpointError, match=re.escape(FC1)):
        ContinualMerger(base)


# tasks that are none


@pytest.mark.parametrize("earlier", [[], [1], [1, 2]])
def test_a_zero_task_vector_leaves_the_merged_weights_alone(earlier: list[int]) -> None:
    """Bit for bit, with a note, at any place in the stream."""
    merger = folded(*earlier)
    before = copied(merger.merged)
    report = merger.fold(tower(), "base")
    assert_same(merger.merged, before)
    assert report.notes == ("its merged layers equal the pretrained model's: nothing was added",)
    assert merger.tasks[-1] == "base"


def test_a_fine_tune_of_norms_and_biases_only_adds_nothing() -> None:
    base = tower()
    incoming = {
        name: tensor if name in only_weights(base) else tuned({name: tensor}, 1)[name] for name, tensor in base.items()
    }
    assert fresh(base).fold(incoming, "norms").notes == (
        "its merged layers equal the pretrained model's: nothing was added",
    )


def test_a_layer_that_was_not_trained_is_left_alone_beside_others() -> None:
    """Layer by layer."""
    merger = folded(1)
    before = copied(merger.merged)
    report = merger.fold(tuned(tower(), 2) | {FC1: tower()[FC1]}, "task2")
    assert report.notes == ()
    assert torch.equal(merger.merged[FC1], before[FC1])
    other = FC1.replace("layers.0", "layers.1")
    assert not torch.equal(merger.merged[other], before[other])


def test_the_same_checkpoint_twice_is_noted() -> None:
    """With the name it had; a well-defined fold all the same."""
    merger = folded(1, 2)
    report = merger.fold(renamed(tuned(tower(), 1), "", "module."), "again")
    assert report.notes == ("the same weights were folded before, as 'task1'",)
    assert all(torch.isfinite(tensor).all() for tensor in merger.merged_parameters().values())
    assert folded(1, 2).reports[1].notes == ()


# continuing


@pytest.mark.parametrize("dtype", ["same", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_a_merge_goes_on_as_if_it_had_never_stopped(dtype: Any, stored: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, whatever the output's dtype; the reports are kept."""
    base = tower(dtype=stored)
    straight = folded(1, 2, 3, pretrained=base)
    merger = folded(1, pretrained=base)
    for seed in (2, 3):
        merger.save(tmp_path / "out", dtype=dtype)
        again = ContinualMerger.load(tmp_path / "out", base)
        assert again.reports == merger.reports
        assert again.fingerprint() == merger.fingerprint()
        merger = again
        merger.fold(tuned(base, seed), f"task{seed}")
    assert_same(merger.merged, straight.merged)
    assert merger.tasks == ["task1", "task2", "task3"]
    assert [report.losses for report in merger.reports] == [report.losses for report in straight.reports]


def test_a_merge_that_folded_nothing_yet_can_be_saved_and_continued(tmp_path: Path) -> None:
    fresh().save(tmp_path / "out")
    merger = ContinualMerger.load(tmp_path / "out", tower())
    merger.fold(tuned(tower(), 1), "task1")
    assert merger.fingerprint() == folded(1).fingerprint()


def test_the_pretrained_model_may_be_given_in_another_form(tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    base = tiny.folder_of(tmp_path / "base", renamed(tower(), "", "vision_model."))
    merger = ContinualMerger.load(str(out), base)
    merger.fold(tuned(tower(), 2), "task2")
    assert merger.fingerprint() == folded(1, 2).fingerprint()


def test_layers_that_were_chosen_are_chosen_again(tmp_path: Path) -> None:
    merger = ContinualMerger(tower(), Add(), layers=["*.fc1.weight"])
    merger.fold(tuned(tower(), 1), "a")
    out = merger.save(tmp_path / "out")
    again = ContinualMerger.load(out, tower(), method=Add(), layers=["*.fc1.weight"])
    assert again.fingerprint() == merger.fingerprint()
    with pytest.raises(
        CheckpointError, match=r"made of other layers than are chosen now \(4 differ, first `enc.*`layers`"
    ):
        ContinualMerger.load(out, tower(), method=Add(), layers=["*.fc2.weight"])


@pytest.mark.parametrize("other", [OPCM, TaskArithmetic, tiny.fast_method])
def test_another_method_is_named_before_what_it_would_merge(other: Any, tmp_path: Path) -> None:
    """A method of every parameter has other layers; that is no other pretrained model."""
    merger = ContinualMerger(tower(), Add())
    merger.fold(tuned(tower(), 1), "a")
    out = merger.save(tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=rf"^the merge was made with \S*Add, not with \S*{type(other()).__name__}"
    ):
        ContinualMerger.load(out, tower(), method=other())


def test_another_pretrained_model_is_refused(tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    other = tower()
    other[FC1][0, 0] += 1e-6
    with pytest.raises(CheckpointError, match="was started from another pretrained model"):
        ContinualMerger.load(out, other)
