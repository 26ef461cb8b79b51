"""A study: measure what is not known yet, keep each result as it comes, then write tables and figures.

A cell is one stream in one order by one method. Its result is written as soon as it is known, under a hash of
everything it depends on; an interrupted study goes on where it was, and a changed one measures only what changed.
"""

import pickle
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.backbones.base import Backbone
from safemerge_pl.checkpoints.open import Source
from safemerge_pl.data.experts import find_experts
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.functional import SCORES
from safemerge_pl.reports.study import StudyFigure, StudyResults, write_study
from safemerge_pl.runtime.console import say
from safemerge_pl.runtime.files import local_path, write_json
from safemerge_pl.runtime.names import name_list
from safemerge_pl.study.bench import Bench, Job, References
from safemerge_pl.study.cells import Cell, StudyRow
from safemerge_pl.study.checks import check_study
from safemerge_pl.study.executors import LocalProcesses
from safemerge_pl.study.kept import hash_result, read_kept
from safemerge_pl.study.spread import spread

__all__ = ["Study"]

_REFERENCES = {"pretrained": "Pre-trained", "individual": "Individual"}
"""Rows of the models that are not merged, and what tables and files call them."""


class Study:
    """Measure every cell and write tables and figures.

    Args:
        backbone: the pretrained model.
        streams: name -> data module; each gives tasks, control sets and images.
        rows: methods with their settings.
        experts: where the fine-tuned models are, as for ``MergeCallback``.
        orders: seeds of the task orders; 42 to 51 are the paper's. ``None`` is the order as given.
        figures: what to draw.
        folder: where cells, tables and figures go.
        title: above the table.
        pretrained: the row of the pretrained model.
        individual: the row of the experts on their own.
        sets: tasks or control sets that get a column of their own in the tables; every set is in ``study.json``.
        overhead: add iterations, times and memory to the table.
        jobs: processes that measure cells side by side, each with its share of the threads. Times and memory of an
            overhead table are only comparable with one. In a script, more than one needs the usual
            ``if __name__ == "__main__":`` guard.
        device: where models are merged and scored: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU where there is one.
        assert_scores: stop where a reference row is further from the published scores than this share.
        executor: whose workers measure cells, instead of this machine's processes: a
            :class:`~safemerge_pl.study.DaskExecutor`, or any other of ``concurrent.futures``. It stays open. Workers
            need this package and find models and images under the same paths; the study's folder is written here only.
    """

    def __init__(
        self,
        backbone: Backbone,
        streams: dict[str, StreamDataModule],
        rows: list[StudyRow],
        experts: str | list[str] | dict[str, str] = "zoo",
        orders: list[int | None] | int | None = None,
        figures: list[StudyFigure] | None = None,
        folder: str = "runs/study",
        title: str = "Study",
        pretrained: bool = True,
        individual: bool = True,
        sets: list[str] | str | None = None,
        overhead: bool = False,
        jobs: int = 1,
        device: str = "cpu",
        assert_scores: float | None = None,
        executor: Executor | None = None,
    ) -> None:
        labels = [row.label for row in rows]
        if not rows or len(set(labels)) < len(labels):
            raise MisconfigurationException(
                f"`rows` must be distinct and not empty, got {', '.join(labels) or 'none'}."
            )
        self.backbone, self.streams, self.rows, self.experts = backbone, streams, rows, experts
        self.orders: list[int | None] = [orders] if orders is None or isinstance(orders, int) else list(orders)
        self.figures, self.sets = figures or [], [] if sets is None else name_list(sets, "sets")
        self.folder, self.title, self.overhead = local_path(folder), title, overhead
        if jobs < 1:
            raise MisconfigurationException(f"`jobs` must be at least 1, got {jobs}.")
        self.pretrained, self.individual, self.jobs = pretrained, individual, jobs
        if executor is not None and jobs > 1:
            raise MisconfigurationException(
                f"`jobs` are processes of this machine; leave {jobs} out, the `executor` has its own workers."
            )
        self.device, self.assert_scores, self.executor = device, assert_scores, executor
        self.results: list[dict[str, Any]] = []
        self.references: dict[str, dict[str, dict[str, Any]]] = {}
        self.sources: dict[str, dict[str, Source]] = {}  # the expert of each task, by stream

    def cells(self) -> list[Cell]:
        """Every cell, stream by stream and order by order: an interrupted study has whole orders."""
        return [
            Cell(row.label, stream, order, varied, method, bound, max_drift, row.layers)
            for stream in self.streams
            for order in self.orders
            for row in self.rows
            for varied, method, bound, max_drift in row.methods(stream)
        ]

    def run(self) -> None:
        """Measure what is not known yet, then write ``table.md``, ``table.tex``, ``study.json`` and the figures."""
        cells = self.cells()
        for note in self.check():
            say(f"note: {note}")
        paths = [self._path(cell) for cell in cells]
        self._measure(self._missing_references(), cells, paths)
        self.results = [
            {"row": cell.row, "stream": cell.stream, "order": cell.order, "varied": cell.varied} | read_kept(path)
            for cell, path in zip(cells, paths, strict=True)
        ]
        write_study(self.collect(), self.folder)

    def check(self) -> list[str]:
        """See that rows, figures and sets name what the study has, and find the experts; nothing is measured.

        Returns:
            Notes.

        Raises:
            MisconfigurationException: for the first name that the study does not have, or if a task has no expert.
        """
        notes = check_study(self.rows, self.streams, self.figures, self.sets, self.assert_scores)
        self.sources = {name: find_experts(self.experts, list(data.stream)) for name, data in self.streams.items()}
        return notes

    def collect(self) -> StudyResults:
        """What was measured, as plain values for tables and figures."""
        return StudyResults(
            title=self.title,
            streams=list(self.streams),
            orders=self.orders,
            cells=self.results,
            references=self.references,
            varied=[row.label for row in self.rows if row.vary],
            sets=self.sets,
            overhead=self.overhead,
            figures=self.figures,
        )

    def _measure(self, references: Sequence[References], cells: Sequence[Cell], paths: Sequence[Path]) -> None:
        """Measure references and cells that are not known, here or on workers; each is kept here as it comes."""
        missing = [index for index, path in enumerate(paths) if not path.exists()]
        for index in sorted(set(range(len(cells))).difference(missing)):
            self._say(index, cells, read_kept(paths[index]), "known")
        places = {id(cells[index]): index for index in missing}
        parallel = self.executor is not None or self.jobs > 1
        start, measured = time.perf_counter(), 0  # of the cells, which follow the references unless side by side

        def keep(job: Job, result: dict[str, Any]) -> None:
            nonlocal measured, start
            if isinstance(job, References):
                self._keep_references(job, result)
                start = start if parallel else time.perf_counter()
                return
            index = places[id(job)]
            write_json(paths[index], result)
            measured += 1
            left = (time.perf_counter() - start) / measured * (len(missing) - measured)
            self._say(index, cells, result, f"at most {left / 60:.0f} min left")

        jobs: list[Job] = [*references, *(cells[index] for index in missing)]
        if not jobs:
            return
        bench = Bench(self.backbone, self.streams, self.sources, self.device, self.assert_scores)
        blank = pickle.dumps(bench) if parallel else b""  # for other processes, before anything is loaded
        bench.require_fit(cell for cell in cells if cell.order == self.orders[0])
        if self.executor is not None:
            spread(self.executor, blank, jobs, keep)
        elif parallel:
            with LocalProcesses(self.jobs) as executor:
                spread(executor, blank, jobs, keep)
        else:
            for job in jobs:
                keep(job, bench.measure(job, say))

    def _say(self, index: int, cells: Sequence[Cell], result: dict[str, Any], note: str) -> None:
        cell = cells[index]
        scores = "  ".join(f"{key} {100 * result[key]:.1f}" for key in SCORES if key in result)
        varied = "".join(f" {key}={value}" for key, value in cell.varied.items())
        where = f"{cell.row}{varied}, {cell.stream} tasks, order {cell.order}"
        say(f"{index + 1:>4}/{len(cells)} {where}  {scores}  ({note})")

    def _missing_references(self) -> list[References]:
        """What is not known of the rows of models that are not merged; takes up what is."""
        wanted = [key for key, want in zip(_REFERENCES, (self.pretrained, self.individual), strict=True) if want]
        missing = []
        for stream in self.streams:
            path = self._references_path(stream)
            kept = read_kept(path) if path.exists() else {}
            known = {key: kept[name] for key, name in _REFERENCES.items() if name in kept}
            self.references[stream] = {_REFERENCES[key]: known[key] for key in wanted if key in known}
            if not set(wanted) <= known.keys():
                missing.append(References(stream, tuple(wanted), known))
        return missing

    def _keep_references(self, job: References, rows: dict[str, Any]) -> None:
        write_json(self._references_path(job.stream), {_REFERENCES[key]: row for key, row in rows.items()})
        self.references[job.stream] = {_REFERENCES[key]: rows[key] for key in job.wanted}

    def _references_path(self, stream: str) -> Path:
        return self.folder / "cells" / f"references-{self._hash(stream, {})}.json"

    def _path(self, cell: Cell) -> Path:
        method = {"class": type(cell.method).__qualname__, **cell.settings}
        return self.folder / "cells" / f"{self._hash(cell.stream, {'order': cell.order, 'method': method})}.json"

    def _hash(self, stream: str, extra: dict[str, Any]) -> str:
        return hash_result(self.backbone, self.streams[stream], self.sources[stream], extra)
