"""What a fold costs, counted: decompositions, passes over the incoming model, and waits for the device."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from safemerge_pl.checkpoints import open_checkpoint
from safemerge_pl.folding import engine
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import NUFILT, OPCM, TSVM, IsoC, KnOTSTies, MergeMethod, SafeMerge, WUDIMerging


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
    assert counts_of(method, decomposed) == expected


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
    assert reads == Counter(dict.fromkeys(tiny.only_weights(base), 2))
