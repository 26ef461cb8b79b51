"""One fold: what a method sees, in which order, in how much memory, and what it costs."""

import re
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import (
    FC1,
    Add,
    assert_same,
    copied,
    folded,
    fresh,
    refused,
    tower,
    tuned,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.folding import engine
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import (
    NUFILT,
    OPCM,
    TSVM,
    IsoC,
    KnOTSTies,
    MergeMethod,
    SafeMerge,
    Stack,
    StackResult,
    TaskArithmetic,
    WUDIMerging,
)


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


def test_weights_keep_two_cores_at_work_with_biases_between_them() -> None:
    """Two weights must be in work at once, or the barrier breaks."""
    together = threading.Barrier(2, timeout=30)

    class Meets(TaskArithmetic):
        def fold_rest(self, stack: Stack) -> StackResult:
            if stack.merged.dim() == 3:
                together.wait()
            return self.fold_stack(stack)

    threads = torch.get_num_threads()
    sizes = {"a.weight": (4, 4), "a.bias": (4,), "b.weight": (4, 4), "b.bias": (4,)}
    base = {name: torch.ones(size) for name, size in sizes.items()}
    try:
        torch.set_num_threads(2)
        merger = ContinualMerger(base, Meets(1.0))
        merger.fold({name: tensor + 1 for name, tensor in base.items()}, "one")
    finally:
        torch.set_num_threads(threads)
    assert all(merger.merged[name].eq(2).all() for name in sizes)


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


@pytest.mark.parametrize("scale", [1e20, 1e30])
def test_a_task_too_large_for_its_losses_changes_nothing(scale: float) -> None:
    """Its squares overflow, so the mask and the losses mean nothing; not folded as if it were empty."""
    base = tower()
    huge = {name: tensor * scale if tensor.is_floating_point() else tensor for name, tensor in tuned(base, 2).items()}
    assert re.search(r"vision\.0\.\w+.*finite", refused(folded(1), huge, "two"))


def test_a_diverging_recovery_changes_nothing() -> None:
    """The layer and the setting are named."""
    assert re.search(r"vision\.0\.\w+.*finite.*`lr`", refused(fresh(lr=1e37), tuned(tower(), 1), "two"))


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


# what a fold costs, counted: decompositions, passes over the incoming model, and waits for the device


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many matrices were decomposed, by kind."""
    counts: Counter[str] = Counter()

    def counting(kind: str) -> Any:
        real = getattr(torch.linalg, kind)

        def call(matrices: Tensor, *args: Any, **kwargs: Any) -> Any:
            counts[kind] += matrices.shape[:-2].numel()
            return real(matrices, *args, **kwargs)

        return call

    for kind in ("eigh", "svd", "qr"):
        monkeypatch.setattr(torch.linalg, kind, counting(kind))
    return counts


def counts_of(method: MergeMethod, decomposed: Counter[str]) -> list[dict[str, int]]:
    """Matrices decomposed in each of three folds."""
    base, found = tiny.tower(), []
    merger = ContinualMerger(base, method)
    for task in (1, 2, 3):
        decomposed.clear()
        merger.fold(tiny.tuned(base, task), f"task{task}")
        found.append(dict(decomposed))
    return found


LAYERS = 10
"""Selected matrices of the tiny tower; its two second feed-forward matrices make twelve linear layers, and the position
table thirteen matrices."""


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # the pretrained weights once a stream, the task vector once for both of its bases, the merged vector from the
        # second task on; and the small Gram matrix of the complement
        (tiny.fast_method(), [{"eigh": 3 * LAYERS}] * 3),
        (tiny.fast_method(utility_weight=0.0), [{"eigh": 2 * LAYERS}] * 3),
        (tiny.fast_method(use_mask=False), [{"eigh": LAYERS}, {"eigh": 2 * LAYERS}, {"eigh": 2 * LAYERS}]),
        (tiny.fast_method(use_recovery=False), [{"eigh": 3 * LAYERS}, {"eigh": 2 * LAYERS}, {"eigh": 2 * LAYERS}]),
        (NUFILT(null_rank=3, recovery_rank=2, task_rank=2, num_steps=2), [{}, *[{"eigh": 2 * LAYERS}] * 2]),
        (WUDIMerging(num_steps=2), [{}] * 3),
        (IsoC(), [{}, *[{"eigh": LAYERS + 3}] * 2]),
        (OPCM(), [{}, *[{"eigh": LAYERS + 2}] * 2]),
        (KnOTSTies(), [{}, *[{"eigh": LAYERS + 2}] * 2]),
        (TSVM(), [{}, *[{"eigh": 2 * (LAYERS + 3), "svd": 2 * (LAYERS + 3)}] * 2]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, MergeMethod) else "",
)
def test_nothing_is_decomposed_twice(
    method: MergeMethod, expected: list[dict[str, int]], decomposed: Counter[str]
) -> None:
    found = counts_of(method, decomposed)
    # what finds the leading directions of two pretrained matrices, once a stream: three steps each
    assert [counts.pop("qr", 0) for counts in found] == [2 * 3, 0, 0]
    assert found == expected


def test_bases_of_the_pretrained_model_are_kept_from_one_stream_to_the_next(
    decomposed: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "WORTH_KEEPING", 1)
    base = tiny.tower()

    def fold(base: tiny.Tensors = base, **settings: Any) -> tuple[str, int]:
        decomposed.clear()
        merger = ContinualMerger(base, tiny.fast_method(**settings))
        return merger.fold(tiny.tuned(tiny.tower(), 1), "one").merged, decomposed["eigh"]

    expected, everything = fold()[0], 3 * LAYERS
    monkeypatch.setenv("SAFEMERGE_CACHE", str(tmp_path))
    assert fold() == (expected, everything)
    files = list((tmp_path / "bases").iterdir())
    assert fold() == (expected, everything - LAYERS)
    assert fold(keep_ratio=0.9)[1] == everything - LAYERS  # the pretrained bases do not depend on it
    assert fold(scoring_rank=3)[1] == everything
    assert fold({name: 2 * tensor for name, tensor in base.items()})[1] == everything
    for file in files:
        file.write_bytes(file.read_bytes()[:20])
    assert fold() == (expected, everything)
    assert fold() == (expected, everything - LAYERS)
    monkeypatch.setenv("SAFEMERGE_CACHE", str(files[0]))  # no folder: nothing can be written
    assert fold() == (expected, everything)


def test_small_models_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFEMERGE_CACHE", str(tmp_path / "kept"))
    ContinualMerger(tiny.tower(), tiny.fast_method()).fold(tiny.tuned(tiny.tower(), 1), "one")
    assert not (tmp_path / "kept").exists()


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device: reading a value out of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [SafeMerge, NUFILT, WUDIMerging])
def test_no_step_of_a_solver_waits_for_the_device(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits of a fold do not depend on the number of steps."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # the mode below sees its own thread only
    base, waits = tiny.tower(), []
    for steps in (1, 9):
        merger = ContinualMerger(base, kind(num_steps=steps))
        merger.fold(tiny.tuned(base, 1), "one")
        with Waits() as mode:
            merger.fold(tiny.tuned(base, 2), "two")
        waits.append(mode.count)
    assert waits[0] == waits[1]


def test_an_incoming_tensor_is_read_once_to_check_and_once_to_merge() -> None:
    base = tiny.tower()
    reads: Counter[str] = Counter()

    class Counted(type(open_checkpoint(base))):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Tensor:
            reads[name] += 1
            return super().__getitem__(name)  # type: ignore[no-any-return]

    merger = ContinualMerger(base, tiny.fast_method())
    merger.fold(Counted(tiny.tuned(base, 1), "here"), "one")
    rest = [name for name in base if base[name].is_floating_point() and name not in tiny.only_weights(base)]
    beside = dict.fromkeys(rest, 1)  # how much of the change is left out
    assert reads == Counter(dict.fromkeys(tiny.only_weights(base), 2) | beside)
