"""One fold: read, merge and collect stack by stack. The merger decides whether the result counts."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from safemerge_pl.architectures.layers import MergeLayer
from safemerge_pl.errors import CheckpointError
from safemerge_pl.folding.leading import LeadingDirections, share_inside
from safemerge_pl.folding.processes import Processes
from safemerge_pl.folding.report import LayerReport, layer_rows
from safemerge_pl.folding.rounding import unrounded
from safemerge_pl.folding.stacks import (
    CORE_STACK_ENTRIES,
    LARGE_ENTRIES,
    MAX_CORE_ENTRIES,
    Folded,
    concatenate,
    copy_if_shared,
    fold_rows,
    guard,
    plan_stacks,
    stack_matrices,
)
from safemerge_pl.methods.base import MergeMethod, Stack, StackResult, Vectors
from safemerge_pl.runtime.arithmetic import exact_arithmetic
from safemerge_pl.runtime.cores import flat_parts, length_of, map_on_cores
from safemerge_pl.runtime.disk_cache import CachedTensors
from safemerge_pl.runtime.environment import machine_key

__all__ = ["Folding", "plan_fold"]

WORTH_KEEPING = 2**18
"""Entries of a matrix from which on a decomposition takes longer than reading a file."""

AT_ONCE = 8
"""Tensors outside of stacks that are handed to the cores together: weights and biases take turns in a model, so that
pairs of them would leave all cores but one without work."""

_Layers = tuple[MergeLayer, ...]
_Fold = Callable[[Stack], StackResult]
_Out = TypeVar("_Out")


@dataclass
class Folding:
    """What one fold needs and what it finds out.

    Attributes:
        method: how to merge.
        index: position of the incoming task in the stream, from 1.
        counts: how many earlier tasks changed each layer, by its name.
        layers: matrices that are merged in stacks.
        others: tensors that are merged one by one.
        pretrained: tensors of the pretrained model by parameter.
        current: gives a parameter as merged so far, float32.
        incoming: tensors of the incoming model by parameter.
        device: where the arithmetic runs.
        processes: among which the work is shared out.
        owners: rank of the process that folds each parameter.
        reference: fingerprint of the pretrained layers.
        on_progress: called with the merged and the total number of weights.
        leading: leading directions of pretrained matrices, against which changes are held; ``None`` for none.
        caches: what depends on the pretrained model alone, by device and layers of a stack; lives as the stream does.
        rows: one report per layer, by its name.
        losses: of the inner optimisations, summed over layers: before each step and after the last.
        solve_seconds: wall time of the inner optimisations.
        notes: what the user should know.
    """

    method: MergeMethod
    index: int
    counts: Mapping[str, int]
    layers: list[MergeLayer]
    others: list[MergeLayer]
    pretrained: Mapping[str, Tensor]
    current: Callable[[str], Tensor]
    incoming: Mapping[str, Tensor]
    device: torch.device
    processes: Processes
    owners: Mapping[str, int]
    reference: str
    caches: dict[tuple[str, ...], CachedTensors]
    on_progress: Callable[[int, int], None]
    leading: LeadingDirections | None = None
    rows: dict[str, LayerReport] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    solve_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    _coarse: set[str] = field(default_factory=set)  # layers in which rounding is larger than the change

    def __post_init__(self) -> None:
        if not (self.method.concurrent or self.processes.apart):  # its state must see every stack
            self.processes, self.owners = Processes(shared=False), dict.fromkeys(self.owners, 0)

    def run(self, staged: MutableMapping[str, Tensor]) -> None:
        """Put the new merged parameters that are this process's own into ``staged``.

        Raises:
            CheckpointError: naming the layer at which it cannot be done.
            PeerError: if it cannot be done on another process.
        """
        self.method.prepare(self.index, _Passes(self))
        everybody = self.processes.share(lambda: self._fold_own(staged))
        for found in everybody:
            self.rows |= found.rows
            self.notes += found.notes
        self.solve_seconds = max(found.seconds for found in everybody)  # they ran side by side
        losses = {number: losses for found in everybody for number, losses in found.losses.items()}
        for _, summed in sorted(losses.items()):
            self.losses = [a + b for a, b in zip(self.losses, summed, strict=True)] if self.losses else summed
        self._rescale(staged)
        self._note_rounding(set().union(*(found.coarse for found in everybody)))

    def _fold_own(self, staged: MutableMapping[str, Tensor]) -> "_Found":
        """Fold what is this process's own."""
        numbers = {stack[0].name: number for number, stack in enumerate(self._stacks())}
        own = [layer for layer in (*self.layers, *self.others) if self._is_own(layer)]
        found = _Found(notes=self.notes, coarse=self._coarse)
        done, total = 0, sum(layer.entries for layer in own)
        self.on_progress(done, total)
        for layers, result, rows in self._results():
            self.processes.check()
            for layer, row, matrix in zip(layers, rows, result.merged, strict=True):
                if not row.sound:
                    raise CheckpointError(
                        f"layer {layer.name}: scores, loss or merged weights are not finite; its task vector (norm "
                        f"{row.task_norm:.3g}) or `lr` is too large."
                    )
                self._place(staged, layer, matrix, alone=len(layers) == 1)
            done += sum(layer.entries for layer in layers)
            self.on_progress(done, total)
            found.rows |= {row.layer: row for row in rows}
            found.seconds += result.solve_seconds
            if result.losses is not None:
                found.losses[numbers[layers[0].name]] = result.losses.double().sum(1).tolist()
        self.notes = []
        return found

    def _is_own(self, layer: MergeLayer) -> bool:
        return self.owners[layer.parameter] == self.processes.rank

    def _note_rounding(self, found: set[str]) -> None:
        """Say which layers were changed by less than their format rounds them."""
        first = next((layer.name for layer in (*self.layers, *self.others) if layer.name in found), None)
        if first is not None:
            self.notes.append(
                f"rounding is larger than the change in {len(found)} of the layers that it stores in fewer bits than "
                f"the pretrained model, first {first}: give it in the pretrained model's format if you can"
            )

    def _place(self, staged: MutableMapping[str, Tensor], layer: MergeLayer, matrix: Tensor, *, alone: bool) -> None:
        """Put one merged matrix where it belongs; one that is a whole parameter and no part of a stack as it is."""
        name = layer.parameter
        if alone and layer.rows is None and not layer.transposed:
            staged[name] = matrix.to("cpu", torch.float32).contiguous()
            return
        if name in staged:
            whole = staged[name]
        elif layer.rows is None:
            whole = torch.empty(layer.shape[::-1] if layer.transposed else layer.shape, dtype=torch.float32)
        else:  # rows that no layer covers stay as they are
            whole = self.current(name).clone()
        layer.view(whole).copy_(matrix)
        staged[name] = whole

    def _results(self) -> Iterator[tuple[_Layers, StackResult, list[LayerReport]]]:
        """Fold stack by stack what is this process's own, several at a time where there are cores for them."""
        fold = guard(self.method, self.method.fold_stack)
        for batch, on_cores in self._batches(self._plan()):
            results = self._fold_batch(fold, batch, on_cores)
            yield from ((layers, *result) for layers, result in zip(batch, results, strict=True))
        for batch, on_cores in self._batches([(layer,) for layer in self.others], at_least=AT_ONCE):
            results = self._fold_rest(batch, on_cores)
            yield from ((layers, *result) for layers, result in zip(batch, results, strict=True))

    @property
    def _side_by_side(self) -> bool:
        return self.device.type == "cpu" and self.method.concurrent

    def _plan(self) -> list[_Layers]:
        return plan_fold(self.layers, self.method, self.device)

    def _stacks(self) -> list[_Layers]:
        """Everything that is folded, in order."""
        return [*self._plan(), *((layer,) for layer in self.others)]

    def _batches(self, plan: Sequence[_Layers], at_least: int = 1) -> Iterator[tuple[list[_Layers], bool]]:
        """Own stacks handed out together, and whether each gets a core to itself: then ``at_least`` so many."""
        own = [stack for stack in plan if self._is_own(stack[0])]  # whoever owns one layer of a stack owns all
        for small, group in itertools.groupby(own, lambda stack: stack[0].entries <= MAX_CORE_ENTRIES):
            stacks, on_cores = list(group), small and self._side_by_side
            step = max(torch.get_num_threads(), at_least) if on_cores else 1
            yield from ((stacks[start : start + step], on_cores) for start in range(0, len(stacks), step))

    def _fold_batch(self, method: _Fold, batch: list[_Layers], on_cores: bool) -> list[Folded]:
        def fold(layers: _Layers) -> Folded:
            return self._fold(method, layers, self.device)

        return list(map_on_cores(fold, batch) if on_cores else map(fold, batch))

    def _fold(self, method: _Fold, layers: _Layers, device: torch.device) -> Folded:
        """Fold one stack; where the device's memory runs out, half of it at a time, and single layers on the CPU."""
        found = self._attempt(method, layers, device)
        if found is not None:
            return found
        self.caches.pop(_cache_key(layers, device), None)
        if len(layers) > 1:
            half = len(layers) // 2
            return concatenate([self._fold(method, part, device) for part in (layers[:half], layers[half:])])
        self.notes.append(f"layer {layers[0].name} was folded on the CPU: the memory of {device} ran out")
        return self._fold(method, layers, torch.device("cpu"))

    def _attempt(self, method: _Fold, layers: _Layers, device: torch.device) -> Folded | None:
        """Fold one stack; ``None`` where there is not enough memory. Other failures name the layers."""
        try:
            with exact_arithmetic(device), _name_layers(layers):  # these settings are per thread
                stack = self._read_stack(layers, device)
                result = copy_if_shared(method(stack), stack)
                return result, self._with_leading(layers, stack, layer_rows(stack, result))
        except torch.OutOfMemoryError as error:
            if len(layers) == 1 and device.type == "cpu":
                raise CheckpointError(f"layer {layers[0].name}: {error}") from error
        return None  # outside of the handler, which keeps the tensors of the failed attempt alive

    def _with_leading(self, layers: _Layers, stack: Stack, rows: list[LayerReport]) -> list[LayerReport]:
        """The reports, with where the change of those layers lies that are looked at."""
        if self.leading is None:
            return rows
        for place, layer in enumerate(layers):
            part = self.leading.part_of(layer)
            if part is not None:
                energies = self.leading.inside(part, stack.pretrained[place], stack.task_vector[place])
                rows[place] = replace(rows[place], leading=share_inside([energies]))
        return rows

    def _fold_rest(self, batch: list[_Layers], on_cores: bool) -> list[Folded]:
        """Tensors outside of stacks; a large one, which takes room several times, a few rows at a time if it may be."""
        (layer,) = batch[0]
        fold = guard(self.method, self.method.fold_rest)
        large = len(batch) == 1 and layer.entries > LARGE_ENTRIES  # several at once are small
        if not (large and self.method.elementwise):
            return self._fold_batch(fold, batch, on_cores)
        with _name_layers(batch[0]):
            return [fold_rows(fold, layer.name, self.index, self._read(layer), self.device)]

    def look_at_own(self, look: Callable[[Iterator[tuple[Tensor, Tensor]]], _Out]) -> Iterator[tuple[str, _Out]]:
        """Look at the accumulated and the task vector of each layer that is this process's own.

        Args:
            look: gets pairs of flat float32 parts of both; called on several threads at once where there are cores.

        Yields:
            Name of a layer, and what ``look`` returned for it, in order.
        """

        def read_and_look(layers: _Layers) -> tuple[str, _Out]:
            parts = zip(*(flat_parts(tensor, self.device) for tensor in self._read(layers[0])), strict=True)
            there = (tuple(part.to(self.device).float() for part in triple) for triple in parts)
            return layers[0].name, look((merged - base, incoming - base) for base, merged, incoming in there)

        for batch, on_cores in self._batches([(layer,) for layer in (*self.layers, *self.others)], at_least=AT_ONCE):
            self.processes.check()
            yield from (map_on_cores if on_cores else map)(read_and_look, batch)

    def _read_stack(self, layers: _Layers, device: torch.device) -> Stack:
        """A stack on a device, with what is known of its pretrained weights."""
        parts = zip(*map(self._read, layers), strict=True)
        theta_0, merged, theta_t = (stack_matrices(list(matrices)).to(device) for matrices in parts)
        names = tuple(layer.name for layer in layers)
        counts = tuple(self.counts.get(name, 0) + 1 for name in names)
        return Stack(names, self.index, theta_0, merged, theta_t, self._cache(layers, device), counts)

    def _read(self, layer: MergeLayer) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's pretrained, merged and incoming weights, as they are stored."""
        base, merged = layer.view(self.pretrained[layer.parameter]), layer.view(self.current(layer.parameter))
        new, is_coarse = unrounded(base, layer.view(self.incoming[layer.parameter]))
        if is_coarse:
            self._coarse.add(layer.name)
        return base, merged, new

    def _cache(self, layers: _Layers, device: torch.device) -> CachedTensors:
        """What depends on the pretrained weights of a stack alone; that of large matrices also for the next stream."""
        key = _cache_key(layers, device)
        if key not in self.caches:
            origin = [self.reference, type(self.method).__qualname__, *key[1:], *machine_key(device)]
            self.caches[key] = CachedTensors(origin if layers[0].entries >= WORTH_KEEPING else None, device)
        return self.caches[key]

    def _length(self, staged: Mapping[str, Tensor], name: str) -> float:
        parts = zip(*map(flat_parts, (staged[name], self.pretrained[name])), strict=True)
        return length_of(merged - base.float() for merged, base in parts)

    def _rescale(self, staged: MutableMapping[str, Tensor]) -> None:
        """Apply the method's factor to the accumulated vectors."""
        if type(self.method).rescale is MergeMethod.rescale:
            return
        names = dict.fromkeys(layer.parameter for stack in self._stacks() for layer in stack)
        own = [name for name in names if self.owners[name] == self.processes.rank]
        lengths = self.processes.collect(
            lambda: dict(zip(own, map_on_cores(lambda name: self._length(staged, name), own), strict=True))
        )
        factor = self.method.rescale(math.hypot(*(lengths[name] for name in names)))
        if factor != 1.0:
            self.processes.agree(lambda: self._multiply(staged, own, factor))

    def _multiply(self, staged: MutableMapping[str, Tensor], names: Sequence[str], factor: float) -> None:
        for name in names:
            base = self.pretrained[name].float()
            staged[name] = staged[name].sub_(base).mul_(factor).add_(base)


@dataclass
class _Found:
    """What one process has found out, as plain values.

    Attributes:
        rows: one report per layer, by its name.
        losses: summed over the layers of each stack, by its place in the plan.
        seconds: wall time of the inner optimisations.
        notes: what the user should know.
        coarse: layers in which rounding is larger than the change.
    """

    rows: dict[str, LayerReport] = field(default_factory=dict)
    losses: dict[int, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    coarse: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Passes(Vectors):
    """Passes over everything that is merged, each process over its own part."""

    folding: Folding

    def __call__(self, look: Callable[[Iterator[tuple[Tensor, Tensor]]], _Out], /) -> Iterator[_Out]:
        folding = self.folding
        if folding.processes.count == 1:  # one after another, when they are asked for
            yield from (seen for _, seen in folding.look_at_own(look))
            return
        seen = folding.processes.collect(lambda: dict(folding.look_at_own(look)))
        yield from (seen[layer.name] for layer in (*folding.layers, *folding.others))

    def add_up(self, counts: Tensor) -> Tensor:
        return torch.stack(self.folding.processes.gather(counts)).sum(0)


def plan_fold(layers: Sequence[MergeLayer], method: MergeMethod, device: torch.device) -> list[_Layers]:
    """Stacks of a fold: what is in one depends on shapes, method and kind of device only, never on cores or processes.

    Args:
        layers: matrices that are merged in stacks.
        method: how.
        device: where.
    """
    side_by_side = device.type == "cpu" and method.concurrent
    return plan_stacks(layers, CORE_STACK_ENTRIES) if side_by_side else plan_stacks(layers)


@contextmanager
def _name_layers(layers: _Layers) -> Iterator[None]:
    """Have failures inside name the layers, but for a lack of memory."""
    try:
        yield
    except (CheckpointError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"layers {layers[0].name} to {layers[-1].name}: {error}") from error


def _cache_key(layers: _Layers, device: torch.device) -> tuple[str, ...]:
    return (device.type, *(layer.name for layer in layers))
