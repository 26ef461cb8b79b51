"""A cost model of folds: bytes of files, operations and messages, fitted to small folds; and predictions.

Costs are seconds of a core (``time.process_time``), which other programs on the machine change little; a process with
one thread of its own takes as long on the clock. ``python -m benchmarks cost`` takes a few minutes.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file

from benchmarks.literal import roofline
from benchmarks.models import vit
from safemerge_pl.folding.processes import Processes
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import MergeMethod, NaiveAccumulation, SafeMerge

__all__ = ["cost"]

_DECOMPOSITION = 16
"""Products of its size that one decomposition of a square matrix takes (RESULTS.md)."""

_PARTS = ("files", "operations", "messages")

_FITTED = [(width, blocks, count) for width in (256, 512) for blocks in (1, 2, 4, 8) for count in (1, 2)]
_CHECKED = [(768, 3, 1), (768, 3, 2)]  # wider than any that is fitted
"""Width, blocks and processes of the folds."""

_LLAMA = {
    "7 B": (32, 4096, 4096, 11008, 32000),
    "70 B": (80, 8192, 1024, 28672, 128256),
    "400 B": (126, 16384, 1024, 53248, 128256),
}
"""Layers, hidden width, width of keys and values, feed-forward width, vocabulary; of Llama 2 and 3.1."""

_METHODS = (NaiveAccumulation(), SafeMerge())

CORES = 64
"""Of a node, each as fast as one of this machine."""


@dataclass(frozen=True)
class Fold:
    """What a process of a fold has to do, if all of them have the same share.

    Attributes:
        read: GB of the pretrained and the incoming model's files.
        operations: 10^12 floating-point operations of the decompositions and of the recovery.
        messages: thousands of tensors whose hashes and reports processes tell each other.
        written: GB of the output's weights and masters.
    """

    read: float
    operations: float
    messages: float
    written: float

    def values(self) -> list[float]:
        """In the order of ``_PARTS``; what is read and what is written grow alike, so that no fit tells them apart."""
        return [self.read + self.written, self.operations, self.messages]


def cost(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Rates, the folds that they are fitted to, those that check them, and predictions."""
    runs = list(_measure(_FITTED))
    rates, start = fit([fold for fold, _, _ in runs], [seconds for _, seconds, _ in runs])
    rows: list[dict[str, object]] = [
        {"rate": part, "s_per_unit": rate} for part, rate in zip(_PARTS, rates, strict=True)
    ]
    rows.append({"rate": "start", "s_per_unit": start})
    checked = [(*run, "check") for run in _measure(_CHECKED)]
    for fold, seconds, where, kind in [*((*run, "fit") for run in runs), *checked]:
        predicted = start + float(np.dot(rates, fold.values()))
        rows.append({"kind": kind, "fold": where, "measured_s": seconds, "predicted_s": predicted})
        rows[-1]["ratio"] = predicted / seconds
    return [*rows, *predict(rates)]


def fit(folds: list[Fold], seconds: list[float]) -> tuple[list[float], float]:
    """Rates by least squares of relative errors, none below zero, and the seconds that every fold takes.

    Example:
        >>> folds = [Fold(1, 0, 0, 0), Fold(2, 1, 0, 0), Fold(1, 2, 1, 1), Fold(3, 1, 2, 1), Fold(1, 1, 0, 4)]
        >>> rates, start = fit(folds, [sum(fold.values()) * 2 + 1 for fold in folds])
        >>> [round(rate, 3) for rate in rates], round(start, 3)
        ([2.0, 2.0, 2.0], 1.0)
    """
    whole = np.array([[*fold.values(), 1.0] for fold in folds]) / np.array(seconds)[:, None]
    kept = list(range(whole.shape[1]))
    while True:  # a part that would save time is left out, the worst first
        found, *_ = np.linalg.lstsq(whole[:, kept], np.ones(len(folds)), rcond=None)
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    rates = np.zeros(whole.shape[1])
    rates[kept] = found
    return rates[:-1].tolist(), float(rates[-1])


def predict(rates: list[float]) -> Iterator[dict[str, object]]:
    """Core hours and wall time of a first fold with a process per core, each of which reads its own layers alone."""
    files, operations, _ = rates
    for name, (layers, hidden, keys, feed, vocabulary) in _LLAMA.items():
        shapes = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden), (feed, hidden), (feed, hidden)]
        # merged ones have masters in float32 as well; the last feed-forward matrix and embeddings are copied
        merged = layers * sum(map(math.prod, shapes))
        total = merged + layers * feed * hidden + 2 * vocabulary * hidden
        gigabytes = {"read": 2 * 2 * total / 1e9, "written": (2 * total + 4 * merged) / 1e9}
        largest = max(_operations(*shape, SafeMerge()) for shape in shapes) * operations
        core = layers * sum(_operations(*shape, SafeMerge()) for shape in shapes) * operations
        core += sum(gigabytes.values()) * files
        for nodes in (1, 8, 64):
            seconds = max(core / (CORES * nodes), largest)
            limit = "largest matrix" if seconds == largest else "cores"
            row = {"model": name, "parameters_b": total / 1e9, "nodes": nodes, "core_hours": core / 3600}
            yield {**row, "hours": seconds / 3600, "limit": limit, **gigabytes}


def _operations(d_out: int, d_in: int, method: MergeMethod) -> float:
    """10^12 operations that one matrix takes in a first fold."""
    if not isinstance(method, SafeMerge):
        return 0.0
    small, large = sorted((d_out, d_in))
    decompositions = 2 * (2.0 * _DECOMPOSITION * small**3 + 2.0 * large * small**2)  # of the model and of the task
    return (decompositions + roofline(1, d_out, d_in, method)) / 1e12


def _measure(folds: list[tuple[int, int, int]]) -> Iterator[tuple[Fold, float, str]]:
    """Folds from disk to disk, with and without arithmetic, all of one number of processes in the same processes."""
    for count in sorted({count for *_, count in folds}):
        sizes = [(width, blocks) for width, blocks, processes in folds if processes == count]
        with tempfile.TemporaryDirectory() as folder:
            for width, blocks in sizes:
                base = vit(0, blocks=blocks, width=width)
                for name, tensors in (("base", base), ("expert", vit(1, base, blocks=blocks, width=width))):
                    place = Path(folder, f"{width}x{blocks}", name)
                    place.mkdir(parents=True)
                    save_file(tensors, place / "model.safetensors")
            mp.start_processes(  # type: ignore[no-untyped-call]
                _work, (count, folder, sizes), nprocs=count, start_method="spawn"
            )
            found = json.loads(Path(folder, "seconds.json").read_text())
        for (width, blocks), seconds in zip(sizes, found, strict=True):
            for method, taken in zip(_METHODS, seconds, strict=True):
                label = f"{type(method).__name__}, {blocks} x {width}, {count} processes"
                yield _describe(width, blocks, count, method), taken, label


def _describe(width: int, blocks: int, count: int, method: MergeMethod) -> Fold:
    tensors = vit(0, blocks=blocks, width=width)
    entries = sum(tensor.numel() for tensor in tensors.values())
    merged = 8 * blocks * width**2  # q, k, v, out and the first feed-forward matrix
    operations = blocks * (4 * _operations(width, width, method) + _operations(4 * width, width, method))
    messages = 0.0 if count == 1 else len(tensors) / 1e3
    return Fold(8 * entries / 1e9 / count, operations / count, messages, 4 * (entries + merged) / 1e9 / count)


def _work(rank: int, count: int, folder: str, sizes: list[tuple[int, int]]) -> None:
    torch.set_num_threads(1)
    os.environ["SAFEMERGE_CACHE"] = ""  # decompositions of one pretrained model are not kept for the next
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", count), rank=rank, world_size=count)
    places = [Path(folder, f"{width}x{blocks}") for width, blocks in sizes]
    _fold(places[0], SafeMerge())  # libraries are loaded
    found = [[_fold(place, method) for method in _METHODS] for place in places]
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _fold(place: Path, method: MergeMethod) -> float:
    """Core seconds of one fold from disk to disk, of the process that takes the most."""
    dist.barrier()
    start = time.process_time()
    processes = Processes(shared=True, apart=True)
    merger = ContinualMerger(place / "base", method, processes=processes)
    merger.fold(place / "expert", "one")
    merger.save(place / type(method).__name__)
    return max(processes.gather(time.process_time() - start))
