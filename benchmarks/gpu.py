"""Folds of ViT-B/32 and ViT-L/14 shapes on a GPU: masks against the CPU's, the same bits twice, seconds and memory.

``python -m benchmarks gpu`` takes less than two minutes on an H200 beside 16 cores. ``--device cpu --tiny`` runs the
same code on sizes that tell nothing.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.literal import make_stack
from safemerge_pl.checkpoints import open_checkpoint
from safemerge_pl.maths import leading, linalg
from safemerge_pl.maths.linalg import complement_basis, right_singular_basis
from safemerge_pl.methods import MergeMethod, SafeMerge, SafeShare, Stack, safe_merge, safe_share
from safemerge_pl.methods.base import clock
from safemerge_pl.zoo import Zoo

__all__ = ["gpu"]

_SHAPES = {
    "ViT-B/32": [(48, 768, 768), (12, 3072, 768)],
    "ViT-L/14": [(96, 1024, 1024), (24, 4096, 1024)],
}
_TINY = {"tiny": [(3, 96, 96), (2, 192, 96)]}

_LIMIT = 1e-4
"""Share of a mask's entries that may differ from the CPU's, which come from full decompositions."""

Row = dict[str, object]


def gpu(arguments: argparse.Namespace) -> list[Row]:
    """Rows of checks and times; ``in_full`` counts matrices that the iteration left to a full decomposition.

    Raises:
        SystemExit: with all figures, if masks are not the CPU's or two runs differ in a bit; or if there is no GPU.
    """
    device, tiny = torch.device(arguments.device), arguments.tiny
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    torch.set_float32_matmul_precision("highest")
    merge = SafeMerge(scoring_rank=16, recovery_rank=8) if tiny else SafeMerge()
    share = SafeShare(scoring_rank=16, shared_rank=24) if tiny else SafeShare()
    with torch.inference_mode():
        name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
        rows: list[Row] = [{"what": "card, threads beside it", "of": f"{name}, {torch.get_num_threads()}"}]
        rows += [_masks(name, stack, rank, device) for name, stack, rank in _stacks(tiny)]
        for model, shapes in (_TINY if tiny else _SHAPES).items():
            stacks = [make_stack(*shape, device=str(device)) for shape in shapes]
            least = 64 if tiny else linalg._LARGE
            for method in (merge, share):
                caches: list[dict[str, Tensor]] = [{} for _ in stacks]
                with _iteration(device, least) as full:
                    rows.append(_twice(method, stacks, model))
                    full.clear()
                    times = _stream(method, stacks, caches, 8)  # the first task pays for the pretrained directions
                    rows.append({**times, "of": model, "iterated": "yes", "in_full": sum(full)})
                with _iteration(None, least):
                    times = _stream(method, stacks, caches, 1)  # they are at hand here
                    rows.append({**times, "of": model, "iterated": "no; one task, times 8"})
            rows += _pieces(model, stacks[0], merge.scoring_rank, least)
            del stacks
    if any(row.get("passed") is False for row in rows):
        raise SystemExit("\n".join(["A check has failed:", *(str(row) for row in rows)]))
    return rows


@contextmanager
def _iteration(device: torch.device | None, least: int) -> Iterator[list[int]]:
    """Iterate on a device from a width on, or on none; yields how many matrices each full decomposition got."""
    full: list[int] = []
    iterate, decompose = linalg._leading_basis, leading._decompose

    def count(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        full.append(len(gram))
        return decompose(gram, rank)

    def tell(matrices: Tensor, rank: int) -> Tensor:
        try:
            return iterate(matrices, rank)
        except RuntimeError as error:  # which the package takes as a reason for a full decomposition
            raise SystemExit(f"the iteration failed: {error}") from error

    with (
        patch.object(linalg, "_ITERATED_ON", (device.type,) if device else ()),
        patch.object(linalg, "_LARGE", least),
        patch.object(linalg, "_leading_basis", tell),
        patch.object(leading, "_decompose", count),
    ):
        yield full


# --- checks ----------------------------------------------------------------------------------------------------------


def _stacks(tiny: bool) -> Iterator[tuple[str, Stack, int]]:
    """Weights whose masks are compared: the zoo's, and random ones of ViT-B/32's width; each with a scoring rank."""
    zoo = Zoo()
    base = open_checkpoint(zoo.model)
    names = [name for name, shape in base.shapes().items() if "vision" in name and shape[1:] == (128,)]
    for task in zoo.tasks()[: 1 if tiny else 3]:
        expert = open_checkpoint(zoo.expert(task))
        for shape in {base.shape(name) for name in names if name in expert and "layers" in name}:
            layers = tuple(name for name in names if base.shape(name) == shape and "layers" in name)
            before, after = (torch.stack([source[name].float() for name in layers]) for source in (base, expert))
            yield f"zoo, {task}, {len(layers)} x {shape[0]} x {shape[1]}", Stack(layers, 1, before, before, after), 21
    width, rank = (96, 16) if tiny else (768, 128)
    for layers, rows, columns in ((2, width, width), (1, 4 * width, width), (1, width, 4 * width)):
        yield f"random, {layers} x {rows} x {columns}", make_stack(layers, rows, columns), rank
    noise = torch.randn(2, 2, width, width, generator=torch.Generator().manual_seed(0)) / width**0.5
    yield f"noise, 2 x {width} x {width}", Stack(("a", "b"), 1, noise[0], noise[0], noise[0] + noise[1] / 100), rank
    low = noise[1][:, :, :8] @ noise[1][:, :8]
    yield f"rank 8, 2 x {width} x {width}", Stack(("a", "b"), 1, noise[0], noise[0], noise[0] + low / 100), rank


def _masks(name: str, stack: Stack, rank: int, device: torch.device) -> Row:
    """The share of a stack's entries that SAFE-Merge and SAFE-Share keep on one device and not on the other."""
    moved = Stack(stack.layers, stack.index, *(x.to(device) for x in (stack.pretrained, stack.merged, stack.incoming)))
    merge, share = SafeMerge(scoring_rank=rank), SafeShare(scoring_rank=rank)

    def both(of: Stack) -> Tensor:
        merged = merge._mask(of, right_singular_basis(of.task_vector, rank))
        return torch.stack([merged, share._mask(of, rank)]).cpu()

    with _iteration(None, linalg._LARGE):
        expected = both(stack)
    with _iteration(device, 64) as full:
        found = both(moved)
    differ = (found != expected).double().mean((1, 2, 3)).tolist()
    return {"what": "masks", "of": name, "differ": max(differ), "passed": max(differ) <= _LIMIT, "in_full": sum(full)}


def _twice(method: MergeMethod, stacks: list[Stack], model: str) -> Row:
    """Whether two folds give the same bits; they also load libraries and allocate memory before the clock runs."""
    first, second = ([method.fold_stack(_forget(stack, {})).merged for stack in stacks] for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return {"what": f"same bits twice, {method.label}", "of": model, "passed": same}


def _forget(stack: Stack, cache: dict[str, Tensor]) -> Stack:
    """The stack without what was worked out of it, but for the cache."""
    return Stack(stack.layers, stack.index, stack.pretrained, stack.merged, stack.incoming, cache)


# --- times -----------------------------------------------------------------------------------------------------------


def _stream(method: MergeMethod, stacks: list[Stack], caches: list[dict[str, Tensor]], tasks: int) -> Row:
    """Seconds that eight tasks take, and what they go to; where fewer are run, they are multiplied."""
    device, spent = stacks[0].pretrained.device, 0.0

    def measure(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            nonlocal spent
            begin = clock(device)
            result = function(*args)
            spent += clock(device) - begin
            return result

        return call

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = _memory(device)
    with (
        patch.object(safe_merge, "right_singular_basis", measure(right_singular_basis)),
        patch.object(safe_merge, "complement_basis", measure(complement_basis)),
        patch.object(safe_share, "right_singular_basis", measure(right_singular_basis)),
    ):
        start, solving = clock(device), 0.0
        for _ in range(tasks):
            for stack, cache in zip(stacks, caches, strict=True):
                solving += method.fold_stack(_forget(stack, cache)).solve_seconds
        seconds = clock(device) - start
    return {
        "what": f"8 tasks, {method.label}",
        "seconds": seconds * 8 / tasks,
        "decompositions_s": spent * 8 / tasks,
        "solver_s": solving * 8 / tasks,
        "rest_s": (seconds - spent - solving) * 8 / tasks,
        "weights_gib": held,
        "peak_gib": _memory(device) - held,  # beyond the weights
    }


def _memory(device: torch.device) -> float:
    """GiB of a GPU that were in use at most since the last reset."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def _pieces(model: str, stack: Stack, rank: int, least: int) -> list[Row]:
    """What a decomposition consists of, one by one: where its time goes on this card."""
    wide, block = stack.pretrained.double(), rank + rank // 2
    gram = wide.mT @ wide
    columns = torch.linalg.qr(gram[:1, :, :block]).Q.expand(len(gram), -1, -1).contiguous()
    small = columns.mT @ gram @ columns
    strong = stack.task_vector + stack.task_vector[:, :, :32] @ stack.task_vector[:, :32]  # some directions stand out
    device = gram.device
    few = max(1, len(gram) // 12)
    pieces: dict[str, Callable[[], object]] = {
        "Gram matrices": lambda: wide.mT @ wide,
        "step of a filter": lambda: gram @ columns,
        "squaring": lambda: gram @ gram,
        "Cholesky of the proof": lambda: torch.linalg.cholesky_ex(gram),
        "Cholesky QR": lambda: leading._orthonormalize(columns),
        "small matrices to the CPU": lambda: small.cpu(),
        "eigh of small ones on cores": lambda: leading.decompose_on_cores(small),
        "eigh of small ones, a twelfth": lambda: torch.linalg.eigh(small[:few]),
        "eigh, a twelfth": lambda: torch.linalg.eigh(gram[:few]),
        "whole iteration": lambda: right_singular_basis(stack.task_vector, rank),
        "whole iteration, strong directions": lambda: right_singular_basis(strong, rank),
    }
    rows: list[Row] = []
    with _iteration(device, least) as full:
        for name, piece in pieces.items():
            piece()
            full.clear()
            start = clock(device)
            piece()
            of = f"{model}, {' x '.join(map(str, gram.shape))}, {block} columns"
            rows.append({"what": name, "of": of, "seconds": clock(device) - start, "in_full": sum(full)})
    return rows
