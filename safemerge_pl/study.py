"""Studies: orders x methods x settings over whole streams, every cell measured once and kept.

A cell is one stream in one order by one method. Its result is written as soon as it is known, under a hash of
everything it depends on; an interrupted study goes on where it was, and a changed one measures only what changed.
"""

import dataclasses
import hashlib
import itertools
import json
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.backbones.base import Backbone, cache_key
from safemerge_pl.checkpoints.open import Source, open_checkpoint
from safemerge_pl.data.experts import find_experts
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.data.stream import TaskStream
from safemerge_pl.folding.bound import MaxResponse, choose_bound
from safemerge_pl.folding.selection import plan_merge
from safemerge_pl.functional import SCORES, summarise
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import MergeMethod
from safemerge_pl.reports.study import StudyFigure, StudyResults, write_study
from safemerge_pl.runtime.console import say
from safemerge_pl.runtime.files import local_path, write_json
from safemerge_pl.runtime.memory import PeakMemory
from safemerge_pl.runtime.names import did_you_mean, name_list
from safemerge_pl.scoring.rows import measure_references, require_published
from safemerge_pl.scoring.scorer import Scorer
from safemerge_pl.scoring.weights import swapped_weights
from safemerge_pl.version import __version__

__all__ = ["Cell", "Study", "StudyFigure", "StudyRow"]

_REFERENCES = {"pretrained": "Pre-trained", "individual": "Individual"}
"""Rows of the models that are not merged, and what tables and files call them."""


@dataclass
class StudyRow:
    """A method and the settings it is tried with.

    Args:
        label: name in tables and figures.
        method: the method with its fixed settings.
        vary: values of settings; every combination is measured. ``max_response`` may be among them, as in ``at``.
        at: settings that differ by stream: name of the stream -> setting -> value.
        max_response: bound on the response of what is merged, see :class:`~safemerge_pl.merger.ContinualMerger`.
    """

    label: str
    method: MergeMethod
    vary: dict[str, list[Any]] = field(default_factory=dict)
    at: dict[str, dict[str, Any]] = field(default_factory=dict)
    max_response: MaxResponse = "auto"

    def methods(self, stream: str) -> Iterator[tuple[dict[str, Any], MergeMethod, float | None]]:
        """Varied settings, the method with them, fresh each time, and the bound that holds for it.

        Raises:
            MisconfigurationException: if the method has no such setting, or refuses a value.
        """
        grid = [each if isinstance(each, (list, tuple)) else [each] for each in self.vary.values()]
        settings = [*self.method.settings(), "max_response"]
        for name in (*self.vary, *(name for given in self.at.values() for name in given)):
            if name not in settings:
                raise MisconfigurationException(
                    f"row '{self.label}': {type(self.method).__name__} has no setting '{name}'; "
                    f"{did_you_mean(name, settings)}"
                )
        for values in itertools.product(*grid):
            varied = dict(zip(self.vary, values, strict=True))
            changes = {**self.at.get(stream, {}), **varied}
            try:
                bound: MaxResponse = changes.pop("max_response", self.max_response)
                method: MergeMethod = dataclasses.replace(self.method, **changes)  # type: ignore[type-var]
                yield varied, method, choose_bound(method, bound)
            except (TypeError, ValueError) as error:
                raise MisconfigurationException(f"row '{self.label}': {error}") from error


@dataclass(frozen=True)
class Cell:
    """One stream in one order by one method."""

    row: str
    stream: str
    order: int | None
    varied: dict[str, Any]
    method: MergeMethod
    max_response: float | None = None


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
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self.assert_scores = assert_scores
        self.results: list[dict[str, Any]] = []
        self.references: dict[str, dict[str, dict[str, Any]]] = {}
        self.sources: dict[str, dict[str, Source]] = {}  # the expert of each task, by stream

    def cells(self) -> list[Cell]:
        """Every cell, stream by stream and order by order: an interrupted study has whole orders."""
        return [
            Cell(row.label, stream, order, varied, method, bound)
            for stream in self.streams
            for order in self.orders
            for row in self.rows
            for varied, method, bound in row.methods(stream)
        ]

    def run(self) -> None:
        """Measure what is not known yet, then write ``table.md``, ``table.tex``, ``study.json`` and the figures."""
        cells = self.cells()
        for figure in self.figures:
            _check_figure(figure, self)
        unknown = [
            name for name in self.sets if not any(name in (*d.stream, *d.controls) for d in self.streams.values())
        ]
        if unknown:
            raise MisconfigurationException(f"`sets`: no stream has a set {', '.join(unknown)}.")
        for data in self.streams.values():
            require_published(data, "pretrained", {}, self.assert_scores)
        for row in self.rows:
            stray = next((name for name in row.at if name not in self.streams), None)
            if stray is not None:
                raise MisconfigurationException(
                    f"row '{row.label}', `at`: the study has no stream '{stray}'; {did_you_mean(stray, self.streams)}"
                )
        self.sources = {name: find_experts(self.experts, list(data.stream)) for name, data in self.streams.items()}
        blank = pickle.dumps(self) if self.jobs > 1 else b""  # for other processes, before anything is loaded
        self._load()
        self._require_fit(cells)
        scorers = {name: Scorer(self.backbone, data) for name, data in self.streams.items()}
        for name in self.streams:
            self.references[name] = self._reference_rows(name, scorers[name])
        paths = [self._path(cell) for cell in cells]
        missing = [index for index, path in enumerate(paths) if not path.exists()]
        start, measured = time.perf_counter(), 0
        for index in self._measured(cells, paths, scorers, missing, blank):
            measured += index in missing
            left = (time.perf_counter() - start) / max(measured, 1) * (len(missing) - measured)
            note = f"at most {left / 60:.0f} min left" if index in missing else "known"
            self._say(index, cells, _kept(paths[index]), note)
        self.results = [
            {"row": cell.row, "stream": cell.stream, "order": cell.order, "varied": cell.varied} | _kept(path)
            for cell, path in zip(cells, paths, strict=True)
        ]
        write_study(self.collect(), self.folder)

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

    def _measured(
        self, cells: list[Cell], paths: list[Path], scorers: dict[str, Scorer], missing: list[int], blank: bytes
    ) -> Iterator[int]:
        """Yield each cell's index once its file is there; the known ones first."""
        yield from (index for index in range(len(cells)) if index not in missing)
        if self.jobs == 1:
            for index in missing:
                write_json(paths[index], self._measure(cells[index], scorers[cells[index].stream]))
                yield index
            return
        threads = max(1, torch.get_num_threads() // self.jobs)
        with ProcessPoolExecutor(self.jobs, get_context("spawn"), _start_worker, (blank, threads)) as pool:
            waiting = {pool.submit(_measure_in_worker, index, paths[index]): index for index in missing}
            try:
                for done in as_completed(waiting):
                    done.result()
                    yield waiting[done]
            except BaseException:
                pool.shutdown(cancel_futures=True)  # what is being measured is finished and kept
                raise

    def _say(self, index: int, cells: list[Cell], result: dict[str, Any], note: str) -> None:
        cell = cells[index]
        scores = "  ".join(f"{key} {100 * result[key]:.1f}" for key in SCORES if key in result)
        varied = "".join(f" {key}={value}" for key, value in cell.varied.items())
        where = f"{cell.row}{varied}, {cell.stream} tasks, order {cell.order}"
        say(f"{index + 1:>4}/{len(cells)} {where}  {scores}  ({note})")

    def _measure(self, cell: Cell, scorer: Scorer) -> dict[str, Any]:
        """Merge one stream; score each task when it is merged, and everything at the end."""
        start = time.perf_counter()
        data = self.streams[cell.stream]
        order = TaskStream(list(data.stream), cell.order)
        tower = self._tower()
        device = next(tower.parameters()).device
        merger = ContinualMerger(tower, cell.method, device=device, max_response=cell.max_response)
        when_merged: dict[str, float] = {}
        last: dict[str, float] = {}
        peaks: list[float] = []
        for task in order:
            with PeakMemory(merger.device) as peak:
                merger.fold(self.sources[cell.stream][task], task)
            peaks += [] if peak.mib is None else [peak.mib]
            with swapped_weights(tower, merger.merged_parameters()):
                when_merged[task] = scorer.score(task)
                if task == order[-1]:
                    last = {name: scorer.score(name) for name in (*order, *data.controls) if name != task}
        last[order[-1]] = when_merged[order[-1]]
        tasks, controls = [last[task] for task in order], [last[name] for name in data.controls]
        scores = summarise(tasks, controls, [when_merged[task] for task in order])
        return {
            **scores,
            "accuracies": last,
            "when_merged": when_merged,
            "tasks": list(order),
            "settings": {**cell.method.settings(), **_bound(cell)},
            "scales": [report.scale for report in merger.reports],
            "responses": [report.response for report in merger.reports],
            "merged": merger.fingerprint(),
            "iterations": getattr(cell.method, "num_steps", None),
            "fold_seconds": sum(report.seconds for report in merger.reports) / len(order),
            "solve_seconds": sum(report.solve_seconds for report in merger.reports) / len(order),
            "peak_memory_mib": max(peaks, default=None),
            "seconds": time.perf_counter() - start,
        }

    def _reference_rows(self, stream: str, scorer: Scorer) -> dict[str, dict[str, Any]]:
        """Scores of the pretrained model and of the experts on their own, measured once and kept."""
        known = self.folder / "cells" / f"references-{self._hash(stream, {})}.json"
        kept = _kept(known) if known.exists() else {}
        rows = {key: kept[name] for key, name in _REFERENCES.items() if name in kept}
        wanted = [key for key, want in zip(_REFERENCES, (self.pretrained, self.individual), strict=True) if want]

        def on_row(what: str, row: dict[str, Any]) -> None:
            if "acc" in row:
                say(f"{what}: {100 * row['acc']:.1f}")

        measure_references(
            scorer,
            self._tower(),
            self.sources[stream],
            rows,
            wanted=wanted,
            within=self.assert_scores,
            on_row=on_row,
        )
        write_json(known, {_REFERENCES[key]: row for key, row in rows.items()})
        return {_REFERENCES[key]: rows[key] for key in wanted}

    def _load(self) -> None:
        self.backbone.load()
        self.backbone.to(self.device)

    def _require_fit(self, cells: list[Cell]) -> None:
        """Refuse a method that does not fit the model, before the first cell is measured."""
        base = open_checkpoint(self._tower())
        for cell in cells:
            if cell.order == self.orders[0]:
                try:
                    plan_merge(base, cell.method)
                except ValueError as error:
                    raise MisconfigurationException(f"row '{cell.row}': {error}") from error

    def _tower(self) -> Any:
        return getattr(self.backbone, self.backbone.merged_attr)

    def _path(self, cell: Cell) -> Path:
        method = {"class": type(cell.method).__qualname__, **cell.method.settings(), **_bound(cell)}
        return self.folder / "cells" / f"{self._hash(cell.stream, {'order': cell.order, 'method': method})}.json"

    def _hash(self, stream: str, extra: dict[str, Any]) -> str:
        """Everything a result depends on; experts by path, size and time of change."""
        data = self.streams[stream]
        content = {
            "version": __version__,
            "backbone": cache_key(self.backbone),
            "tasks": list(data.stream),
            "controls": list(data.controls),
            "experts": {task: _stamp(source) for task, source in self.sources[stream].items()},
            **({"data": data.settings()} if data.settings() else {}),
            **extra,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _kept(path: Path) -> dict[str, Any]:
    """What an earlier run measured; plain values, nothing of which is ever built or called."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise MisconfigurationException(
            f"{path} is damaged ({error}); remove it, and what it held is measured again."
        ) from error


def _bound(cell: Cell) -> dict[str, float]:
    """The bound where there is one; results without keep the names of their files."""
    return {} if cell.max_response is None else {"max_response": cell.max_response}


_worker: dict[str, Any] = {}
"""What a process of a study with several jobs holds: the study, its cells, one scorer per stream."""


def _start_worker(blank: bytes, threads: int) -> None:
    torch.set_num_threads(threads)
    study: Study = pickle.loads(blank)
    study._load()
    scorers = {name: Scorer(study.backbone, data) for name, data in study.streams.items()}
    _worker.update(study=study, cells=study.cells(), scorers=scorers)


def _measure_in_worker(index: int, path: Path) -> None:
    cell = _worker["cells"][index]
    write_json(path, _worker["study"]._measure(cell, _worker["scorers"][cell.stream]))


def _stamp(source: Source) -> list[Any]:
    path = local_path(str(source))
    files = sorted(path.glob("*.safetensors")) + sorted(path.glob("*.bin")) if path.is_dir() else [path]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists()]
    return [str(source), stats]


def _check_figure(figure: StudyFigure, study: Study) -> None:
    varied = {key for row in study.rows for key in row.vary}
    sets = {name for data in study.streams.values() for name in (*data.stream, *data.controls)}
    unknown = [name for name in figure.y if name not in sets.union(SCORES)]
    if figure.x not in varied.union(SCORES):
        unknown.insert(0, figure.x)
    labels = {row.label for row in study.rows}
    unknown += [label for label in figure.rows or () if label not in labels]
    if unknown:
        raise MisconfigurationException(f"figure '{figure.file}': the study has no {', '.join(unknown)}.")
