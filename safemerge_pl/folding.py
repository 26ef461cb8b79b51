"""One fold: read, merge and collect stack by stack. The merger decides whether the result counts."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from safemerge_pl.cores import map_on_cores
from safemerge_pl.errors import CheckpointError
from safemerge_pl.fold_report import LayerReport, layer_rows
from safemerge_pl.layers import CORE_STACK_ENTRIES, MAX_CORE_ENTRIES, MergeLayer, plan_stacks
from safemerge_pl.methods.base import MergeMethod, Stack, StackResult
from safemerge_pl.preflight import is_finite
from safemerge_pl.sharing import Processes

__all__ = ["Folding", "exact_arithmetic"]

_Layers = tuple[MergeLayer, ...]


@dataclass
class Folding:
    """What one fold needs and what it finds out.

    Attributes:
        method: how to merge.
        index: position of the incoming task in the stream, from 1.
        layers: matrices that are merged in stacks.
        others: tensors that are merged one by one.
        pretrained: tensors of the pretrained model by parameter.
        current: gives a parameter as merged so far, float32.
        incoming: tensors of the incoming model by its own names.
        names: parameter -> name in ``incoming``.
        device: where the arithmetic runs.
        processes: among which the stacks are shared out.
        caches: what depends on the pretrained model alone, by the layers of a stack; lives as long as the stream.
        rows: a report a layer.
        losses: of the inner optimisations, summed over layers: before each step and after the last.
        solve_seconds: wall time of the inner optimisations.
    """

    method: MergeMethod
    index: int
    layers: list[MergeLayer]
    others: list[MergeLayer]
    pretrained: Mapping[str, Tensor]
    current: Callable[[str], Tensor]
    incoming: Mapping[str, Tensor]
    names: Mapping[str, str]
    device: torch.device
    processes: Processes
    caches: dict[tuple[str, ...], dict[str, Tensor]]
    rows: dict[str, LayerReport] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    solve_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.method.concurrent:  # its state must see every stack
            self.processes = Processes(shared=False)

    def run(self, staged: MutableMapping[str, Tensor]) -> None:
        """Put the new merged parameters into ``staged``.

        Raises:
            CheckpointError: naming the layer at which it cannot be done.
        """
        self.method.prepare(self.index, self._vectors)
        for layers, result, rows in self._results():
            for layer, row, matrix in zip(layers, rows, result.merged, strict=True):
                if not (row.sound and is_finite(matrix)):
                    raise CheckpointError(
                        f"layer {layer.name}: scores, loss or merged weights are not finite; its task vector (norm "
                        f"{row.task_norm:.3g}) or `lr` is too large."
                    )
                name = layer.parameter
                whole = staged[name] if name in staged else self.current(name).clone()
                layer.view(whole).copy_(matrix)
                staged[name] = whole
            self.rows |= {row.layer: row for row in rows}
            self.solve_seconds += result.solve_seconds
            if result.losses is not None:
                summed = result.losses.double().sum(1).tolist()
                self.losses = [a + b for a, b in zip(self.losses, summed, strict=True)] if self.losses else summed
        self._rescale(staged)

    def _results(self) -> Iterator[tuple[_Layers, StackResult, list[LayerReport]]]:
        """Fold stack by stack, several at a time where there are cores or processes for them."""
        for batch, on_cores in self._batches():
            mine = self.processes.agree(functools.partial(self._fold_batch, batch, on_cores))
            shapes = [(len(layers), *layers[0].shape) for layers in batch]
            results = self.processes.exchange(mine, shapes, self.device)
            longest = max(result.solve_seconds for result, _ in results)  # they ran side by side
            results = [(replace(result, solve_seconds=longest / len(results)), rows) for result, rows in results]
            yield from ((layers, *result) for layers, result in zip(batch, results, strict=True))
        for layer in self.others:
            stack = self._read_stack((layer,))
            result = _explained(self.method.fold_rest, stack)
            yield (layer,), result, layer_rows(stack, result)

    def _batches(self) -> Iterator[tuple[list[_Layers], bool]]:
        """Stacks that are folded at the same time, and whether each gets a core to itself.

        What is in a stack depends on shapes, method and kind of device only, never on the number of cores or processes.
        """
        cores = self.device.type == "cpu" and self.method.concurrent
        plan = plan_stacks(self.layers, CORE_STACK_ENTRIES) if cores else plan_stacks(self.layers)
        for small, group in itertools.groupby(plan, lambda stack: math.prod(stack[0].shape) <= MAX_CORE_ENTRIES):
            stacks, size = list(group), self.processes.count
            if cores and small:
                size *= self.processes.threads
            yield from ((stacks[start : start + size], cores and small) for start in range(0, len(stacks), size))

    def _fold_batch(self, batch: list[_Layers], on_cores: bool) -> list[tuple[StackResult, list[LayerReport]]]:
        """This process's part of a batch."""

        def fold(stack: Stack) -> tuple[StackResult, list[LayerReport]]:
            with exact_arithmetic(self.device):  # its switches are a thread's own
                result = _explained(self.method.fold_stack, stack)
                return result, layer_rows(stack, result)

        stacks = [self._read_stack(layers) for layers in self.processes.mine(batch)]
        return map_on_cores(fold, stacks) if on_cores else [fold(stack) for stack in stacks]

    def _read_stack(self, layers: _Layers) -> Stack:
        pretrained, merged, incoming = [], [], []
        for layer in layers:
            base, new = self.pretrained[layer.parameter], self.incoming[self.names[layer.parameter]]
            if new.dtype != base.dtype and torch.equal(base.to(new.dtype), new):
                new = base  # the pretrained tensor, stored in fewer bits: rounding is not a task
            pretrained.append(layer.view(base))
            incoming.append(layer.view(new))
            merged.append(layer.view(self.current(layer.parameter)))
        key = tuple(layer.name for layer in layers)
        theta_0, merged_so_far, theta_t = (_stacked(parts).to(self.device) for parts in (pretrained, merged, incoming))
        return Stack(key, self.index, theta_0, merged_so_far, theta_t, self.caches.setdefault(key, {}))

    def _vectors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, accumulated vector and task vector of everything that is merged, one at a time."""
        for layer in (*self.layers, *self.others):
            stack = self._read_stack((layer,))
            yield layer.name, stack.merged_vector[0], stack.task_vector[0]

    def _rescale(self, staged: MutableMapping[str, Tensor]) -> None:
        """Apply the method's factor to the accumulated vectors."""
        if type(self.method).rescale is MergeMethod.rescale:
            return
        norm = 0.0
        for name, tensor in staged.items():
            norm += float((tensor - self.pretrained[name].float()).double().square().sum())
        factor = self.method.rescale(norm**0.5)
        for name in list(staged) if factor != 1.0 else ():
            base = self.pretrained[name].float()
            staged[name] = staged[name].sub_(base).mul_(factor).add_(base)


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Full float32 whatever surrounds the call: no autocast, no TF32, no inference mode, no graph."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _stacked(parts: list[Tensor]) -> Tensor:
    """Matrices in float32 as one stack; a single one is not copied."""
    return parts[0].float()[None] if len(parts) == 1 else torch.stack([part.float() for part in parts])


def _explained(fold: Callable[[Stack], StackResult], stack: Stack) -> StackResult:
    """Fold, and name the layers if that fails."""
    try:
        return fold(stack)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"layers {stack.layers[0]} to {stack.layers[-1]}: {error}") from error
