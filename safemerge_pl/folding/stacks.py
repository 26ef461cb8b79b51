"""Plan the stacks of a fold, put matrices into them, and take apart or together what came of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from safemerge_pl.architectures.layers import MergeLayer
from safemerge_pl.errors import CheckpointError
from safemerge_pl.folding.report import LayerReport, layer_rows, whole_row
from safemerge_pl.methods.base import MergeMethod, Stack, StackResult

__all__ = [
    "CORE_STACK_ENTRIES",
    "LARGE_ENTRIES",
    "MAX_CORE_ENTRIES",
    "MAX_STACK_ENTRIES",
    "Folded",
    "concatenate",
    "copy_if_shared",
    "fold_rows",
    "guard",
    "plan_stacks",
    "stack_matrices",
]

MAX_STACK_ENTRIES = 2**25
"""Largest stack, in entries (128 MiB in float32). A constant, so that the plan depends on shapes only."""

CORE_STACK_ENTRIES = 2**17
"""Largest stack on a CPU, where a stack is one core's work: it should stay in that core's cache."""

MAX_CORE_ENTRIES = 2**22
"""Largest matrix on a CPU that one core works on alone."""

LARGE_ENTRIES = 2**24
"""Entries of a tensor from which on an elementwise method gets it in parts, of no more each."""

Folded = tuple[StackResult, list[LayerReport]]
"""A stack's result, and one report per layer."""


def plan_stacks(layers: Sequence[MergeLayer], max_entries: int = MAX_STACK_ENTRIES) -> list[tuple[MergeLayer, ...]]:
    """Group layers of equal shape into stacks of at most ``max_entries`` entries (one layer at least).

    Example:
        >>> a, b = MergeLayer("x.0.q", "q0", (2, 2)), MergeLayer("x.0.up", "u0", (8, 2))
        >>> [[layer.name for layer in stack] for stack in plan_stacks([a, b, a, a], max_entries=8)]
        [['x.0.q', 'x.0.q'], ['x.0.q'], ['x.0.up']]
    """
    groups: dict[tuple[int, ...], list[MergeLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.shape, []).append(layer)
    stacks = []
    for shape, group in groups.items():
        size = max(1, max_entries // math.prod(shape))
        stacks += [tuple(group[start : start + size]) for start in range(0, len(group), size)]
    return stacks


def stack_matrices(matrices: list[Tensor]) -> Tensor:
    """Stack matrices in float32, ``(L, d_out, d_in)``; a single one is not copied.

    Example:
        >>> stack_matrices([torch.zeros(2, 3), torch.ones(2, 3)]).shape
        torch.Size([2, 2, 3])
    """
    return matrices[0].float()[None] if len(matrices) == 1 else torch.stack([matrix.float() for matrix in matrices])


def copy_if_shared(result: StackResult, stack: Stack) -> StackResult:
    """Copy a result that lies in the memory of its inputs, which it has to outlive."""
    inputs = (stack.pretrained, stack.merged, stack.incoming, *stack.cache.values())
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    shared = result.merged.untyped_storage().data_ptr() in taken
    return replace(result, merged=result.merged.clone()) if shared else result


def guard(method: MergeMethod, fold: Callable[[Stack], StackResult]) -> Callable[[Stack], StackResult]:
    """Keep a method from outside this package from changing its inputs, which may be the models themselves.

    Args:
        method: how to merge.
        fold: its function for a stack.

    Returns:
        ``fold`` itself for a method of this package, else one that gives it a stack of its own and looks at the result.

    Raises:
        CheckpointError: when called, if the method gives something else than a :class:`StackResult`.

    Example:
        >>> from safemerge_pl.methods import TaskArithmetic
        >>> method = TaskArithmetic()
        >>> guard(method, method.fold_stack) == method.fold_stack
        True
    """
    if type(method).__module__.startswith("safemerge_pl.methods."):
        return fold

    def call(stack: Stack) -> StackResult:
        own = {name: getattr(stack, name).clone() for name in ("pretrained", "merged", "incoming")}
        result = fold(replace(stack, **own))
        if not isinstance(result, StackResult) or not isinstance(result.merged, Tensor):
            raise CheckpointError(
                f"{type(method).__name__}.{fold.__name__} gave {type(result).__name__}, where a StackResult with a "
                "tensor belongs."
            )
        return result

    return call


def concatenate(parts: list[Folded]) -> Folded:
    """Put the results of a stack's parts together as the stack's, on the device of the first."""
    results = [result for result, _ in parts]
    device = results[0].merged.device
    kept, taken, recovered = (
        [share.to(device) for share in shares if share is not None]
        for shares in zip(*((r.kept_fraction, r.taken, r.recovered) for r in results), strict=True)
    )
    losses = [result.losses.to(device) for result in results if result.losses is not None]
    whole = StackResult(
        torch.cat([result.merged.to(device) for result in results]),
        torch.cat(kept) if kept else None,
        torch.cat(losses, dim=1) if losses else None,
        sum(result.solve_seconds for result in results),
        torch.cat(taken) if taken else None,
        torch.cat(recovered) if recovered else None,
    )
    return whole, [row for _, rows in parts for row in rows]


def fold_rows(
    fold: Callable[[Stack], StackResult], name: str, index: int, tensors: Sequence[Tensor], device: torch.device
) -> Folded:
    """Fold one tensor a few rows at a time.

    Args:
        fold: treats every entry by itself.
        name: of the tensor, for the report.
        index: position of the incoming task in the stream, from 1.
        tensors: pretrained, merged so far and incoming, of one shape, as they are stored.
        device: where the arithmetic runs; the result is on the CPU.

    Example:
        >>> from safemerge_pl.methods import TaskArithmetic
        >>> base, incoming = torch.zeros(4, 2), torch.ones(4, 2)
        >>> method = TaskArithmetic(scaling=0.5)
        >>> result, rows = fold_rows(method.fold_rest, "x", 1, [base, base, incoming], torch.device("cpu"))
        >>> result.merged[0, 0].tolist(), rows[0].layer
        ([0.5, 0.5], 'x')
    """
    merged = torch.empty(tensors[0].shape, dtype=torch.float32)
    rows = max(1, LARGE_ENTRIES * len(merged) // merged.numel())
    found = []
    for target, *parts in zip(*(torch.split(tensor, rows) for tensor in (merged, *tensors)), strict=True):
        base, so_far, incoming = (stack_matrices([part]).to(device) for part in parts)
        stack = Stack((name,), index, base, so_far, incoming)
        result = fold(stack)
        target.copy_(result.merged[0])
        found.append((target.numel() / merged.numel(), layer_rows(stack, result)[0]))
    return StackResult(merged[None]), [whole_row(found)]
