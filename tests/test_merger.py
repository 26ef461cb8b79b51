"""Folding, whole or not at all; what may be folded; continuing a saved merge."""

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny import (
    FC1,
    Add,
    Tensors,
    as_file,
    assert_same,
    copied,
    fast_method,
    folded,
    fresh,
    only_weights,
    renamed,
    tower,
    tuned,
)
from torch import Tensor, nn

from safemerge_pl.checkpoints import CheckpointError, Source
from safemerge_pl.folding import engine
from safemerge_pl.merger import ContinualMerger, FoldReport
from safemerge_pl.methods import TSVM, MergeMethod, SafeMerge, Stack, StackResult, WUDIMerging
from safemerge_pl.output.files import MASTER_FILE, STATE_FILE

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


def test_the_report_of_a_fold_is_worked_out_by_hand() -> None:
    base = {"layers.0.mlp.up_proj.weight": torch.zeros(2, 2), "layers.0.mlp.gate_proj.weight": torch.ones(2, 2)}
    incoming = {"layers.0.mlp.up_proj.weight": torch.tensor([[3.0, 0.0], [0.0, 4.0]])} | {
        "layers.0.mlp.gate_proj.weight": torch.ones(2, 2)
    }
    merger = ContinualMerger(base, Add(scaling=0.5))
    report = merger.fold(incoming, "mnist")
    assert (report.task, report.index, report.kept_fraction, report.losses, report.notes) == ("mnist", 1, 1.0, (), ())
    up, gate = report.layers
    assert (up.layer, up.task_norm, up.update_norm, up.kept_fraction, up.loss_first, up.loss_last) == (
        "model.0.up",
        5.0,
        2.5,
        1.0,
        None,
        None,
    )
    assert (gate.layer, gate.task_norm, gate.update_norm) == ("model.0.gate", 0.0, 0.0)
    assert report.merged == merger.fingerprint()
    assert report.seconds > 0
    assert merger.fold(incoming, "again").index == 2


def test_a_report_survives_strict_json() -> None:
    """Plain values and no NaN."""
    report = folded(1, 2).reports[1]
    assert FoldReport.from_dict(json.loads(json.dumps(asdict(report), allow_nan=False))) == report
    assert len(report.losses) == 4
    assert [row.layer for row in report.layers] == [layer.name for layer in fresh().layers]
    assert 0 < report.kept_fraction < 1


def test_losses_are_summed_over_the_layers() -> None:
    report = folded(1, 2).reports[1]
    assert report.losses[0] == pytest.approx(sum(row.loss_first or 0 for row in report.layers))
    assert report.losses[-1] == pytest.approx(sum(row.loss_last or 0 for row in report.layers))


def test_one_layer_of_a_model_can_be_merged_alone() -> None:
    base = tower()
    merger = ContinualMerger(base, Add(), layers=[FC1])
    incoming = tuned(base, 1)
    merger.fold(incoming, "a")
    merged = merger.merged
    assert [name for name in base if not torch.equal(merged[name], base[name])] == [FC1]


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
    expected, merger = fresh({upright: base}), fresh({turned: base.T.contiguous()})
    assert expected.fold({upright: tuned_}, "a").layers[0].layer == "model.0.out"
    merger.fold({turned: tuned_.T.contiguous()}, "a")
    assert torch.equal(merger.merged[turned].T, expected.merged[upright])
    assert not torch.equal(merger.merged[turned], expected.merged[upright])


def test_the_order_of_tensors_in_a_file_does_not_matter() -> None:
    base, incoming = tower(), tuned(tower(), 1)
    merger = fresh(dict(reversed(base.items())))
    merger.fold(dict(reversed(incoming.items())), "task1")
    assert_same(merger.merged, folded(1).merged)
    assert merger.fingerprint() == folded(1).fingerprint()


def test_the_order_in_which_stacks_are_folded_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = folded(1, 2).fingerprint()
    plan = engine.plan_stacks
    monkeypatch.setattr(engine, "plan_stacks", lambda layers, *size: plan(layers, *size)[::-1])
    assert folded(1, 2).fingerprint() == expected


@pytest.mark.parametrize("method", [SafeMerge(scoring_rank=4, recovery_rank=3, task_rank=2), WUDIMerging(), TSVM()])
def test_the_number_of_cores_does_not_matter(method: MergeMethod) -> None:
    """Small stacks get a thread each, and a thread's bits are its own."""
    hashes = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            merger = ContinualMerger(tower(), method)
            merger.fold(tuned(tower(), 1), "one")
            merger.fold(tuned(tower(), 2), "two")
            hashes.append(merger.fingerprint())
    finally:
        torch.set_num_threads(threads)
    assert len(set(hashes)) == 1


def test_the_order_of_tasks_does_matter() -> None:
    """That is why it is recorded."""
    assert folded(1, 2).fingerprint() != folded(2, 1).fingerprint()
    assert folded(2, 1).tasks == ["task2", "task1"]


def test_wrapper_prefixes_on_both_sides_do_not_matter() -> None:
    merger = fresh(renamed(tower(), "", "vision_model."))
    merger.fold(renamed(tuned(tower(), 1), "", "module."), "task1")
    assert merger.fingerprint() == folded(1).fingerprint()
    assert all(name.startswith("vision_model.") for name in merger.merged)


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


def test_a_scalar_of_another_shape_is_no_obstacle() -> None:
    """`logit_scale` as () and as (1,); it is not merged."""
    merger = fresh(tower() | {"logit_scale": torch.tensor(2.0)})
    merger.fold(tuned(tower(), 1) | {"logit_scale": torch.tensor([3.0])}, "a")
    assert merger.merged["logit_scale"].shape == ()
    assert merger.merged["logit_scale"].item() == 2.0


# dtypes


def test_dtypes_may_be_mixed_and_come_in_any_order() -> None:
    """Everything is merged in float32; only the values that a file holds count."""
    base = tower(dtype=torch.float16)
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


def test_a_method_sees_its_place_in_the_stream_and_all_three_models(tmp_path: Path) -> None:
    """Algorithm 1 treats the first task apart; the place survives a stop."""
    seen: list[Stack] = []

    class Watching(Add):
        def fold_stack(self, stack: Stack) -> StackResult:
            seen.append(stack)
            return super().fold_stack(stack)

    base, tasks = tower(), [tuned(tower(), seed) for seed in (1, 2, 3)]
    merger = ContinualMerger(base, Watching(), layers=[FC1, "*.layers.1.mlp.fc1.weight"])
    merger.fold(tasks[0], "1")
    merger.fold(tasks[1], "2")
    method = Watching()
    again = ContinualMerger.load(merger.save(tmp_path / "out"), base, method=method, layers=["*.fc1.weight"])
    again.fold(tasks[2], "3")
    assert [(stack.index, stack.layers) for stack in seen] == [(i, ("vision.0.up", "vision.1.up")) for i in (1, 2, 3)]
    for stack, task in zip(seen, tasks, strict=True):
        assert torch.equal(stack.pretrained[0], base[FC1])
        assert torch.equal(stack.incoming[0], task[FC1])
    assert torch.equal(seen[0].merged, seen[0].pretrained)
    torch.testing.assert_close(seen[2].merged[0], base[FC1] + sum(task[FC1] - base[FC1] for task in tasks[:2]))


def test_a_method_never_sees_the_masters_themselves() -> None:
    """Its stacks are copies: a careless method cannot change the pretrained weights."""

    class Careless(Add):
        def fold_stack(self, stack: Stack) -> StackResult:
            result = StackResult(stack.merged + 1)
            for tensor in (stack.pretrained, stack.merged, stack.incoming):
                tensor.zero_()
            return result

    base = tower()
    incoming = tuned(base, 1)
    kept = copied(incoming)
    merger = ContinualMerger(base, Careless())
    merger.fold(incoming, "a")
    merger.fold(incoming, "b")
    assert_same(incoming, kept)
    torch.testing.assert_close(merger.merged[FC1], base[FC1] + 2)


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


@pytest.mark.parametrize("scale", [1e20, 1e30])
def test_a_task_too_large_for_its_losses_changes_nothing(scale: float) -> None:
    """Its squares overflow, so the mask and the losses mean nothing; not folded as if it were empty."""
    base = tower()
    huge = {name: tensor * scale if tensor.is_floating_point() else tensor for name, tensor in tuned(base, 2).items()}
    assert re.search(r"vision\.0\.\w+.*finite", refused(folded(1), huge, "two"))


def test_a_diverging_recovery_changes_nothing() -> None:
    """The layer and the setting are named."""
    assert re.search(r"vision\.0\.\w+.*finite.*`lr`", refused(fresh(lr=1e37), tuned(tower(), 1), "two"))


def test_a_large_task_is_folded() -> None:
    base = tower()
    merger = folded(1)
    report = merger.fold({n: 1e4 * t if t.is_floating_point() else t for n, t in tuned(base, 2).items()}, "large")
    assert all(torch.isfinite(tensor).all() for tensor in merger.merged_parameters().values())
    assert 0.4 < report.kept_fraction < 0.6


def refused(merger: ContinualMerger, incoming: Source, task: str = "new") -> str:
    """The message of a refusal that changes nothing."""
    before = merger.fingerprint(), merger.tasks
    with pytest.raises(CheckpointError) as caught:
        merger.fold(incoming, task)
    assert (merger.fingerprint(), merger.tasks) == before
    assert str(caught.value).startswith(f"task '{task}': ")
    return str(caught.value)


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


def test_inf_in_the_pretrained_model_is_refused_at_once(tmp_path: Path) -> None:
    base = tower()
    base[FC1][1, 1] = float("inf")
    folder = tiny.folder_of(tmp_path / "base", base)
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(str(folder))}: `{re.escape(FC1)}` has 1 NaN or Inf among 128"
    ):
        ContinualMerger(folder)


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


@pytest.mark.parametrize("task", ["task1", "TASK1", "Task1"])
def test_a_task_name_is_used_once_whatever_its_case(task: str) -> None:
    """Two rows of a table would collapse on some file systems."""
    assert f"a task of the name '{task}' is already merged" in refused(folded(1), tuned(tower(), 2), task)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("stored", ["memory", "file"])
def test_quantised_weights_are_refused(dtype: torch.dtype, stored: str, tmp_path: Path) -> None:
    incoming: Any = tuned(tower(), 2) | {FC1: tower()[FC1].to(dtype)}
    if stored == "file":
        incoming = as_file(incoming, tmp_path / "model")
    message = refused(folded(1), incoming)
    assert f"`{FC1}`" in message
    assert "float32, bfloat16 or float16" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("stored", ["memory", "file"])
def test_a_quantised_pretrained_model_is_refused(dtype: torch.dtype, stored: str, tmp_path: Path) -> None:
    """The rounding of a quantiser is no task."""
    base: Any = tower() | {FC1: tower()[FC1].to(dtype)}
    if stored == "file":
        base = as_file(base, tmp_path / "model")
    with pytest.raises(CheckpointError, match=re.escape(FC1)):
        ContinualMerger(base)


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


def test_the_saved_method_is_built_again(tmp_path: Path) -> None:
    out = folded(1, keep_ratio=0.25, seed=7).save(tmp_path / "out")
    assert ContinualMerger.load(out, tower()).method == fast_method(keep_ratio=0.25, seed=7)


def test_layers_that_were_chosen_are_chosen_again(tmp_path: Path) -> None:
    merger = ContinualMerger(tower(), Add(), layers=["*.fc1.weight"])
    merger.fold(tuned(tower(), 1), "a")
    out = merger.save(tmp_path / "out")
    again = ContinualMerger.load(out, tower(), method=Add(), layers=["*.fc1.weight"])
    assert again.fingerprint() == merger.fingerprint()
    with pytest.raises(CheckpointError):
        ContinualMerger.load(out, tower(), method=Add(), layers=["*.fc2.weight"])


def test_another_pretrained_model_is_refused(tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    other = tower()
    other[FC1][0, 0] += 1e-6
    with pytest.raises(CheckpointError, match="was started from another pretrained model"):
        ContinualMerger.load(out, other)


def test_other_settings_are_refused_with_every_difference(tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"keep_ratio: 0\.5 then, 0\.25 now; lr: 0\.001 then, 0\.1 now"):
        ContinualMerger.load(out, tower(), method=fast_method(lr=0.1, keep_ratio=0.25))


def test_another_method_is_refused(tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"made with safemerge_pl\.methods\.safe_merge\.SafeMerge, not with .*Add"
    ):
        ContinualMerger.load(out, tower(), method=Add())


def test_tampered_masters_are_refused(tmp_path: Path) -> None:
    """One bit."""
    out = folded(1).save(tmp_path / "out")
    masters = load_file(out / MASTER_FILE)
    masters[FC1].view(torch.int32)[0, 0] ^= 1
    save_file(masters, out / MASTER_FILE)
    with pytest.raises(CheckpointError, match="are not those that the state was saved with"):
        ContinualMerger.load(out, tower())


@pytest.mark.parametrize("damage", ["gone", "cut", "empty"])
def test_damaged_masters_are_refused(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path must not be taken for a hub id."""
    out = folded(1).save(tmp_path / "out")
    file = out / MASTER_FILE
    content = file.read_bytes()
    file.unlink() if damage == "gone" else file.write_bytes(content[:-10] if damage == "cut" else b"")

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    monkeypatch.chdir(tmp_path)
    for folder in (out, Path("out")):
        with pytest.raises(CheckpointError, match=MASTER_FILE):
            ContinualMerger.load(folder, tower())


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"format": 1, "tasks": []}'])
def test_a_broken_state_is_refused(content: str, tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    (out / STATE_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(STATE_FILE)):
        ContinualMerger.load(out, tower())


@pytest.mark.parametrize(("version", "remedy"), [(1, "fold again"), (3, "use a newer")])
def test_a_state_of_another_version_is_refused(version: int, remedy: str, tmp_path: Path) -> None:
    """Its format number is there to be looked at, in a folder and in a checkpoint of Lightning."""
    merger = folded(1)
    out = merger.save(tmp_path / "out")
    state = merger.state_dict() | {"format": version}
    (out / STATE_FILE).write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=rf"{STATE_FILE} has format {version}, .*{remedy}"):
        ContinualMerger.load(out, tower())
    with pytest.raises(CheckpointError, match=rf"format {version}, .*{remedy}"):
        merger.load_state_dict(state, tower())


@pytest.mark.parametrize("class_path", ["antigravity.fly", "os.system", "safemerge_pl_evil.methods.X", "X"])
def test_a_state_cannot_name_code_to_run(class_path: str, tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    state = json.loads((out / STATE_FILE).read_text())
    state["method"]["class_path"] = class_path
    (out / STATE_FILE).write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="pass that method as `method`"):
        ContinualMerger.load(out, tower())
    assert "antigravity" not in sys.modules


def test_a_method_of_ones_own_is_given_again(tmp_path: Path) -> None:
    merger = ContinualMerger(tower(), Add(scaling=0.5))
    merger.fold(tuned(tower(), 1), "a")
    out = merger.save(tmp_path / "out")
    with pytest.raises(CheckpointError, match="pass that method"):
        ContinualMerger.load(out, tower())
    assert ContinualMerger.load(out, tower(), method=Add(scaling=0.5)).fingerprint() == merger.fingerprint()


def test_a_folder_that_is_no_merge_is_refused(tmp_path: Path) -> None:
    folder = tiny.folder_of(tmp_path / "base", tower())
    with pytest.raises(CheckpointError, match="is not the output of a merge"):
        ContinualMerger.load(folder, tower())


@dataclass
class Counting(Add):
    """A method with a state of its own."""

    label = "Counting"
    folds: int = field(default=0, init=False)

    def fold_stack(self, stack: Stack) -> StackResult:
        self.folds += 1
        return super().fold_stack(stack)

    def settings(self) -> dict[str, Any]:
        return {"scaling": self.scaling}

    def state_dict(self) -> dict[str, Any]:
        return {"folds": self.folds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.folds = state["folds"]


def test_the_state_of_a_method_is_kept(tmp_path: Path) -> None:
    merger = ContinualMerger(tower(), Counting())
    merger.fold(tuned(tower(), 1), "a")
    out = merger.save(tmp_path / "out")
    method = Counting()
    ContinualMerger.load(out, tower(), method=method)
    assert method.folds == merger.method.state_dict()["folds"] == 2


# what a method and a device may do


@dataclass
class HandsOn(MergeMethod):
    """Returns the tensors it got, as no method should."""

    label = "Hands on"
    scope = "none"
    merges_rest = True
    concurrent = True

    def fold_stack(self, stack: Stack) -> StackResult:
        return StackResult(stack.incoming)

    fold_rest = fold_stack


def test_the_merged_model_is_its_own_whatever_a_method_returns() -> None:
    """An expert that trains on must not change what was merged from it."""
    base = tower()
    incoming = tuned(base, 1)
    merger = ContinualMerger(base, HandsOn())
    merger.fold(incoming, "a")
    before = merger.fingerprint()
    for tensor in (*incoming.values(), *base.values()):
        tensor.zero_()
    assert merger.fingerprint() == before


@dataclass
class NeedsMemory(Add):
    """Runs out of memory on stacks of more than so many layers."""

    most: int = 1

    def fold_stack(self, stack: Stack) -> StackResult:
        if len(stack.layers) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        size = torch.full((len(stack.layers),), 0.5)
        losses = torch.arange(2.0)[:, None].expand(2, len(stack.layers))
        return StackResult(super().fold_stack(stack).merged, size, losses, 1.0)


def test_a_stack_that_does_not_fit_into_memory_is_folded_in_parts() -> None:
    base, incoming = tower(layers=3), tuned(tower(layers=3), 1)
    whole, parts = ContinualMerger(base, NeedsMemory(most=99)), ContinualMerger(base, NeedsMemory(most=2))
    expected, found = whole.fold(incoming, "a"), parts.fold(incoming, "a")
    assert_same(parts.merged, whole.merged)
    assert [row.layer for row in found.layers] == [row.layer for row in expected.layers]
    assert found.kept_fraction == 0.5
    assert found.losses == expected.losses == (0.0, float(len(found.layers)))
    assert found.notes == ()


def test_a_layer_that_does_not_fit_anywhere_is_an_error_that_names_it() -> None:
    base = tower()
    merger = ContinualMerger(base, NeedsMemory(most=0))
    with pytest.raises(CheckpointError, match=r"layer vision\.0\.\S+: CUDA out of memory"):
        merger.fold(tuned(base, 1), "a")
    assert merger.tasks == []


def test_a_layer_that_does_not_fit_on_the_device_is_folded_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that has no memory at all."""
    attempt = engine.Folding._attempt

    def full(self: Any, method: Any, layers: Any, device: torch.device) -> Any:
        return attempt(self, method, layers, device) if device.type == "cpu" else None

    monkeypatch.setattr(engine.Folding, "_attempt", full)
    base = tower()
    merger = ContinualMerger(base, Add(), device="cuda")
    report = merger.fold(tuned(base, 1), "a")
    there = ContinualMerger(base, Add())
    there.fold(tuned(base, 1), "a")
    assert_same(merger.merged, there.merged)
    assert len(report.notes) == len(report.layers)
    assert report.notes[0] == "layer vision.0.k was folded on the CPU: the memory of cuda ran out"
