"""Matrices into a stack, and what came of a stack out of it."""

from dataclasses import replace

import torch
from torch import Tensor

from safemerge_pl.fold_report import LayerReport
from safemerge_pl.methods.base import Stack, StackResult

__all__ = ["Folded", "joined", "owned", "stacked"]

Folded = tuple[StackResult, list[LayerReport]]
"""A stack's result with a report a layer."""


def stacked(matrices: list[Tensor]) -> Tensor:
    """Matrices in float32 as one stack ``(L, d_out, d_in)``; a single one is not copied.

    Example:
        >>> stacked([torch.zeros(2, 3), torch.ones(2, 3)]).shape
        torch.Size([2, 2, 3])
    """
    return matrices[0].float()[None] if len(matrices) == 1 else torch.stack([matrix.float() for matrix in matrices])


def owned(result: StackResult, stack: Stack) -> StackResult:
    """The result in memory of its own, whatever the method did: it outlives the tensors that were read."""
    inputs = (stack.pretrained, stack.merged, stack.incoming, *stack.cache.values())
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    shared = result.merged.untyped_storage().data_ptr() in taken
    return replace(result, merged=result.merged.clone()) if shared else result


def joined(parts: list[Folded]) -> Folded:
    """The results of a stack's parts as the stack's, on the device of the first."""
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
