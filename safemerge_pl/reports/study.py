"""Tables (Markdown, LaTeX, JSON) and figures of a study: mean and standard deviation over task orders."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safemerge_pl.functional import SCORES
from safemerge_pl.runtime.console import say
from safemerge_pl.runtime.environment import environment
from safemerge_pl.runtime.files import write_figure, write_json, write_text
from safemerge_pl.runtime.names import name_list

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Aggregate", "StudyFigure", "StudyResults", "aggregate", "latex", "markdown", "write_study"]

Aggregate = dict[str, Any]
"""``row``, ``stream``, ``varied``, ``orders``, and ``mean`` and ``std`` by score and set."""


@dataclass
class StudyFigure:
    """A figure of a study.

    Args:
        file: name of the PNG.
        x: a varied setting, or a score for a trade-off curve.
        y: scores or sets, one panel for each.
        rows: labels of the rows to draw; all that vary if left out.
        title: above the figure.
    """

    file: str
    x: str
    y: list[str]
    rows: list[str] | None = None
    title: str = ""

    def __post_init__(self) -> None:
        """Take one name for a list of one."""
        self.y = name_list(self.y, "y")
        self.rows = None if self.rows is None else name_list(self.rows, "rows")


@dataclass(frozen=True)
class StudyResults:
    """What a study measured, and how it is to be shown; plain values.

    Attributes:
        title: above the table.
        streams: names, in the order of the table.
        orders: seeds of the task orders.
        cells: one dictionary per cell, as :func:`aggregate` takes them.
        references: stream -> ``"Pre-trained"`` and ``"Individual"`` -> row, where measured.
        varied: labels of the rows that vary a setting.
        sets: tasks or control sets with a column of their own.
        overhead: add iterations, times and memory to the table.
        figures: what to draw.
    """

    title: str
    streams: Sequence[str]
    orders: Sequence[int | None]
    cells: Sequence[dict[str, Any]]
    references: Mapping[str, Mapping[str, dict[str, Any]]]
    varied: Sequence[str] = ()
    sets: Sequence[str] = ()
    overhead: bool = False
    figures: Sequence[StudyFigure] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Of each stream: the scores, then the named sets."""
        return (*SCORES, *self.sets)


def aggregate(results: Sequence[dict[str, Any]]) -> list[Aggregate]:
    """Mean and sample standard deviation (ddof 1) over orders; H is computed per order, then averaged.

    Args:
        results: one dictionary per cell, with ``row``, ``stream``, ``varied`` and the scores.

    Returns:
        One dictionary per row, stream and setting, in order of appearance. ``std`` is empty with one order.

    Example:
        >>> cells = [{"row": "a", "stream": "8", "varied": {}, "accuracies": {}, "ACC": acc} for acc in (0.5, 0.7)]
        >>> found = aggregate(cells)[0]
        >>> round(found["mean"]["ACC"], 3), round(found["std"]["ACC"], 4), found["orders"]
        (0.6, 0.1414, 2)
    """
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["row"], result["stream"], repr(result["varied"])), []).append(result)
    found = []
    for members in groups.values():
        flat = [{**{key: member[key] for key in SCORES if key in member}, **member["accuracies"]} for member in members]
        columns = {name: [row[name] for row in flat] for name in flat[0] if all(name in row for row in flat)}
        for extra in ("drift", "fold_seconds", "solve_seconds", "peak_memory_mib", "iterations"):
            if all(member.get(extra) is not None for member in members):
                columns[extra] = [member[extra] for member in members]
        found.append(
            {
                **{key: members[0][key] for key in ("row", "stream", "varied")},
                "orders": len(members),
                "mean": {name: statistics.fmean(values) for name, values in columns.items()},
                "std": {name: statistics.stdev(values) for name, values in columns.items() if len(values) > 1},
            }
        )
    return found


def table_rows(results: StudyResults, *, plus_minus: str) -> list[list[str]]:
    """Cells of the table: name, then four scores and the named sets of each stream, then overhead."""
    found, columns = aggregate(results.cells), results.columns
    names = list(dict.fromkeys((entry["row"], repr(entry["varied"])) for entry in found))
    rows = []
    for reference in ("Pre-trained", "Individual"):
        if all(reference in results.references[stream] for stream in results.streams):
            cells = [reference]
            for stream in results.streams:
                row = results.references[stream][reference]
                cells += [_cell({**row["accuracies"], **row}.get(score), None, "") for score in columns]
            rows.append(cells + [""] * (4 if results.overhead else 0))
    for label, varied in names:
        entries = {e["stream"]: e for e in found if (e["row"], repr(e["varied"])) == (label, varied)}
        settings = next(iter(entries.values()))["varied"]
        cells = [label + "".join(f", {key}={value}" for key, value in settings.items())]
        for stream in results.streams:
            entry = entries.get(stream, {"mean": {}, "std": {}})
            cells += [_cell(entry["mean"].get(score), entry["std"].get(score), plus_minus) for score in columns]
        if results.overhead:
            mean = next(iter(entries.values()))["mean"]
            solve = f"{mean['solve_seconds']:.2f}" if mean.get("solve_seconds") else "-"
            cells += [f"{mean['iterations']:.0f}" if "iterations" in mean else "-", solve]
            memory = f"{mean['peak_memory_mib']:.0f}" if "peak_memory_mib" in mean else "-"
            cells += [f"{mean['fold_seconds']:.2f}", memory]
        rows.append(cells)
    return rows


def markdown(results: StudyResults) -> str:
    """The table as Markdown; percent, mean ± standard deviation over orders."""
    orders = ", ".join(str(order) for order in results.orders)
    heads = [f"{score} ({stream})" for stream in results.streams for score in results.columns]
    heads += ["iterations", "solving s/task", "total s/task", "peak MiB/fold"] if results.overhead else []
    lines = [f"# {results.title}", "", f"Percent; orders {orders}; ± is the sample standard deviation.", ""]
    lines += ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    lines += ["| " + " | ".join(row) + " |" for row in table_rows(results, plus_minus=" ± ")]
    lines += [f"\n![{figure.title or figure.file}]({figure.file})" for figure in results.figures]
    lines += ["", ", ".join(f"{key} {value}" for key, value in environment().items())]
    return "\n".join(lines) + "\n"


def latex(results: StudyResults) -> str:
    """The table as a LaTeX ``tabular`` for ``booktabs``."""
    scores = results.columns
    columns = len(results.streams) * len(scores) + (4 if results.overhead else 0)
    heads = [_escape(score) for _ in results.streams for score in scores]
    heads += ["Iters.", "Solv. (s)", "Tot. (s)", "Mem. (MiB)"] if results.overhead else []
    groups = " & ".join(rf"\multicolumn{{{len(scores)}}}{{c}}{{{stream} tasks}}" for stream in results.streams)
    lines = [
        rf"\begin{{tabular}}{{l{'r' * columns}}}",
        r"\toprule",
        rf" & {groups} \\",
        "Method & " + " & ".join(heads),
    ]
    lines[-1] += r" \\"
    lines.append(r"\midrule")
    lines += [" & ".join(_escape(cell) for cell in row) + r" \\" for row in table_rows(results, plus_minus=r"$\pm$")]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def write_study(results: StudyResults, folder: Path) -> None:
    """Write ``table.md``, ``table.tex``, ``study.json`` and the figures into a folder."""
    found = aggregate(results.cells)
    write_text(folder / "table.md", markdown(results))
    write_text(folder / "table.tex", latex(results))
    content = {"title": results.title, "orders": results.orders, "references": results.references, "aggregates": found}
    write_json(folder / "study.json", {**content, "cells": results.cells, "environment": environment()})
    for figure in results.figures:
        _draw(results, figure, found, folder)
    say(f"\n{markdown(results)}\ntables and figures: {folder}")


def _draw(results: StudyResults, figure: StudyFigure, found: list[Aggregate], folder: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = figure.rows or results.varied
    width, height = (4.6, 4.2) if figure.x in SCORES else (3.6, 3.4)  # points of a trade-off carry their settings
    canvas = Figure(figsize=(1 + width * len(figure.y), height), layout="constrained")
    FigureCanvasAgg(canvas)
    panels = canvas.subplots(1, len(figure.y), squeeze=False)[0]
    for axes, score in zip(panels, figure.y, strict=True):
        for label in labels:
            for stream in results.streams:
                entries = [e for e in found if (e["row"], e["stream"]) == (label, stream)]
                name = label if len(results.streams) == 1 else f"{label}, {stream} tasks"
                _draw_line(axes, figure, score, entries, name)
        for stream, rows in results.references.items():
            _draw_pretrained(axes, figure.x, score, rows.get("Pre-trained", {}))
            if stream == next(iter(results.streams)):
                axes.set_ylabel(f"{score} (%)")
        if {figure.x, score} == {"ACC", "Gen"}:
            _draw_equal_h(axes)
        axes.set_xlabel(f"{figure.x} (%)" if figure.x in SCORES else figure.x)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    canvas.suptitle(figure.title, fontsize=11)
    write_figure(folder / figure.file, canvas)


def _draw_pretrained(axes: "Axes", x: str, score: str, row: dict[str, Any]) -> None:
    """The pretrained model: a star in a trade-off between two scores, else a line."""
    value = row.get(score, row.get("accuracies", {}).get(score))
    if value is None:
        return
    if x in SCORES:
        if x in row:
            axes.plot(100 * row[x], 100 * value, marker="*", color="#6b7280", markersize=11, linestyle="none")
            axes.annotate("pretrained", (100 * row[x], 100 * value), (5, -9), textcoords="offset points", fontsize=7)
    elif score != "ACC":
        axes.axhline(100 * value, color="#6b7280", linestyle="--", linewidth=1)
        axes.annotate("pretrained", (0.02, 100 * value), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")


def _draw_equal_h(axes: "Axes") -> None:
    """Lines on which H is the same, two points apart; drawn last, so that they do not widen the panel."""
    import numpy as np

    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    x, y = np.meshgrid(np.linspace(max(left, 0.01), right, 200), np.linspace(max(low, 0.01), high, 200))
    h = 2 * x * y / (x + y)
    levels = np.arange(2 * np.ceil(h.min() / 2), h.max(), 2)
    if len(levels):
        lines = axes.contour(x, y, h, levels=levels, colors="#9ca3af", linewidths=0.6, linestyles=":")
        axes.clabel(lines, fmt=lambda value: f"H {value:.0f}", fontsize=6)


def _draw_line(axes: "Axes", figure: StudyFigure, score: str, entries: list[Aggregate], name: str) -> None:
    """One row of the study: a curve over a setting with its spread, or a trade-off between two scores."""
    points = []
    for entry in entries:
        mean, std = entry["mean"], entry["std"]
        x = 100 * mean[figure.x] if figure.x in SCORES and figure.x in mean else entry["varied"].get(figure.x)
        if x is not None and score in mean:
            spread = 100 * std.get(figure.x, 0.0) if figure.x in SCORES else 0.0
            points.append((x, 100 * mean[score], spread, 100 * std.get(score, 0.0), entry["varied"]))
    if not points:
        return
    if figure.x not in SCORES:
        points.sort(key=lambda point: point[0])
    xs, ys, x_spread, y_spread, settings = zip(*points, strict=True)
    options: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 2, "elinewidth": 0.8, "label": name}
    line = axes.errorbar(xs, ys, y_spread if any(y_spread) else None, x_spread if any(x_spread) else None, **options)
    if figure.x in SCORES:
        for place, text in _name_points(zip(xs, ys, strict=True), settings).items():
            colour = line[0].get_color()
            axes.annotate(text, place, textcoords="offset points", xytext=(4, 3), fontsize=6, color=colour)


def _name_points(
    places: Iterable[tuple[float, float]], settings: Iterable[Mapping[str, Any]]
) -> dict[tuple[float, float], str]:
    """What to write beside each point: its settings, or the first and last where several settings give one result.

    Example:
        >>> _name_points([(1.0, 2.0), (3.0, 4.0), (3.0, 4.0)], [{"a": 0.1}, {"a": 0.2}, {"a": 0.3}])
        {(1.0, 2.0): '0.1', (3.0, 4.0): '0.2 to 0.3'}
    """
    found: dict[tuple[float, float], list[str]] = {}
    for place, varied in zip(places, settings, strict=True):
        found.setdefault(place, []).append(",".join(str(value) for value in varied.values()))
    return {place: " to ".join(dict.fromkeys((texts[0], texts[-1]))) for place, texts in found.items()}


def _cell(mean: float | None, std: float | None, plus_minus: str) -> str:
    if mean is None:
        return "-"
    return f"{100 * mean:.1f}" + ("" if std is None else f"{plus_minus}{100 * std:.1f}")


def _escape(text: str) -> str:
    return text.replace("_", r"\_").replace("%", r"\%").replace("&", r"\&")
