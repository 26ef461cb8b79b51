"""Put matrices into a stack, and take apart or together what came of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from safemerge_pl.folding.report import LayerReport, layer_rows, whole_row
from safemerge_pl.methods.base import Stack, StackResult

__all__ = ["LARGE_ENTRIES", "Folded", "concatenate", "copy_if_shared", "fold_rows", "stack_matrices"]

LARGE_ENTRIES = 2**24
"""Entries of a tensor from which on an elementwise method gets it in parts, of no more each."""

Folded = tuple[StackResult, list[LayerReport]]
"""A stack's result, and one report per layer."""


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


def concatenate(parts: list[Folded]) -> Folded:
    """Put the results of a stack's parts together as the stack's, on the device of the first."""
    results = [result for result, _ in parts]
    device = results[0].merged.device
    kept = [result.kept_fraction.to(device) for result in results if result.kept_fraction is not None]
    losses = [result.losses.to(device) for result in results if result.losses is not None]
    whole = StackResult(
        torch.cat([result.merged.to(device) for result in results]),
        torch.cat(kept) if kept else None,
        torch.cat(losses, dim=1) if losses else None,
        sum(result.solve_seconds for result in results),
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
