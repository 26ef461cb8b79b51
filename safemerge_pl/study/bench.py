"""What measures the cells of a study, in this process or in another one, on this machine or elsewhere."""

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.backbones.base import Backbone
from safemerge_pl.checkpoints.open import Source, open_checkpoint
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.data.stream import TaskStream
from safemerge_pl.folding.selection import plan_merge
from safemerge_pl.functional import summarise
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.runtime.memory import PeakMemory
from safemerge_pl.scoring.drift import DriftGauge, gauge_of, require_gauge
from safemerge_pl.scoring.rows import Row, measure_references
from safemerge_pl.scoring.scorer import Scorer
from safemerge_pl.scoring.weights import swapped_weights
from safemerge_pl.study.cells import Cell
from safemerge_pl.study.executors import own_gpu

__all__ = ["Bench", "Job", "References", "measure_elsewhere"]


@dataclass(frozen=True)
class References:
    """The rows of the pretrained model and of the experts on their own, for one stream.

    Attributes:
        stream: name of the stream.
        wanted: ``"pretrained"``, ``"individual"`` or both.
        known: rows that were measured earlier.
    """

    stream: str
    wanted: tuple[str, ...]
    known: Mapping[str, Row]


Job = Cell | References
"""What is measured in one piece, and kept when it is done."""


class Bench:
    """A backbone with its streams, on which one job after another is measured.

    It goes to other processes as it was built: weights and images are read where it is used.

    Args:
        backbone: the pretrained model, not loaded yet.
        streams: name -> data module.
        sources: name of the stream -> the expert of each task.
        device: ``"cpu"``, ``"cuda"`` for the GPU that the process works on, or ``"auto"`` for a GPU where there is one.
        assert_scores: stop where a reference row is further from the published scores than this share.
    """

    def __init__(
        self,
        backbone: Backbone,
        streams: Mapping[str, StreamDataModule],
        sources: Mapping[str, Mapping[str, Source]],
        device: str,
        assert_scores: float | None,
    ) -> None:
        self.backbone, self.streams, self.sources = backbone, streams, sources
        self.device, self.assert_scores = device, assert_scores
        self._scorers: dict[str, Scorer] = {}
        self._gauge: DriftGauge | None = None

    def require_fit(self, cells: Iterable[Cell]) -> None:
        """Refuse a method that does not fit the model, before the first cell is measured.

        Raises:
            MisconfigurationException: naming the row.
        """
        self.backbone.load()
        base = open_checkpoint(self._tower())
        for cell in cells:
            try:
                plan_merge(base, cell.method, cell.layers)
                if cell.max_drift is not None:
                    require_gauge(self.backbone)
            except ValueError as error:
                raise MisconfigurationException(f"row '{cell.row}': {error}") from error

    def measure(self, job: Job, on_line: Callable[[str], None]) -> dict[str, Any]:
        """Measure a job; plain values, as they are kept.

        Args:
            job: what to measure.
            on_line: called with what is to be said on the way.
        """
        if not self._scorers:
            self.backbone.load()
            automatic = "cuda" if torch.cuda.is_available() else "cpu"
            device = automatic if self.device == "auto" else self.device
            self.backbone.to(own_gpu() if device == "cuda" else device)
            self._scorers = {name: Scorer(self.backbone, data) for name, data in self.streams.items()}
            self._gauge = gauge_of(self.backbone, self._tower())
        return self._measure_cell(job) if isinstance(job, Cell) else self._measure_references(job, on_line)

    def _measure_cell(self, cell: Cell) -> dict[str, Any]:
        """Merge one stream; score each task when it is merged, and everything at the end."""
        start = time.perf_counter()
        data, scorer = self.streams[cell.stream], self._scorers[cell.stream]
        order = TaskStream(list(data.stream), cell.order)
        tower = self._tower()
        device = next(tower.parameters()).device
        gauge = None if self._gauge is None else self._gauge.measure
        bounds: dict[str, Any] = {"max_response": cell.max_response, "max_drift": cell.max_drift, "gauge": gauge}
        merger = ContinualMerger(tower, cell.method, layers=cell.layers, device=device, **bounds)
        when_merged: dict[str, float] = {}
        drift: float | None = None
        last: dict[str, float] = {}
        peaks: list[float] = []
        for task in order:
            with PeakMemory(merger.device) as peak:
                merger.fold(self.sources[cell.stream][task], task)
            peaks += [] if peak.mib is None else [peak.mib]
            with swapped_weights(tower, merger.merged_parameters()):
                when_merged[task] = scorer.score(task)
                if task == order[-1]:
                    drift = None if self._gauge is None else self._gauge.measure()
                    last = {name: scorer.score(name) for name in (*order, *data.controls) if name != task}
        last[order[-1]] = when_merged[order[-1]]
        tasks, controls = [last[task] for task in order], [last[name] for name in data.controls]
        return {
            **summarise(tasks, controls, [when_merged[task] for task in order]),
            "accuracies": last,
            "when_merged": when_merged,
            "tasks": list(order),
            "settings": cell.settings,
            "scales": [report.scale for report in merger.reports],
            "responses": [report.response for report in merger.reports],
            "drift": drift,
            "merged": merger.fingerprint(),
            "iterations": getattr(cell.method, "num_steps", None),
            "fold_seconds": sum(report.seconds for report in merger.reports) / len(order),
            "solve_seconds": sum(report.solve_seconds for report in merger.reports) / len(order),
            "peak_memory_mib": max(peaks, default=None),
            "seconds": time.perf_counter() - start,
        }

    def _measure_references(self, job: References, on_line: Callable[[str], None]) -> dict[str, Any]:
        """Scores of the pretrained model and of the experts on their own, with those known already."""
        rows = dict(job.known)

        def on_row(what: str, row: Row) -> None:
            if "acc" in row:
                on_line(f"{what}: {100 * row['acc']:.1f}")

        measure_references(
            self._scorers[job.stream],
            self._tower(),
            self.sources[job.stream],
            rows,
            wanted=job.wanted,
            within=self.assert_scores,
            on_row=on_row,
        )
        return rows

    def _tower(self) -> Any:
        return getattr(self.backbone, self.backbone.merged_attr)


_benches: dict[bytes, Bench] = {}
"""The bench that this process works on, by its pickled form."""

_one_at_a_time = threading.Lock()
"""Held while a job is measured: all threads of a process share one backbone, which holds one job's weights."""


def measure_elsewhere(pickled: bytes, job: Job) -> str:
    """Measure a job in a worker.

    Args:
        pickled: a :class:`Bench`; it stays loaded for the next job.
        job: what to measure.

    Returns:
        JSON with the ``result``, and the ``lines`` to be said: whoever gets it need not trust it.
    """
    lines: list[str] = []
    with _one_at_a_time:
        if pickled not in _benches:
            _benches.clear()
            _benches[pickled] = pickle.loads(pickled)
        result = _benches[pickled].measure(job, lines.append)
    return json.dumps({"result": result, "lines": lines})
