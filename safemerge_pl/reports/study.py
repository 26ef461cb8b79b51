"""Tables (Markdown, LaTeX, JSON) and figures of a study: mean and standard deviation over task orders."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from safemerge_pl.functional import SCORES
from safemerge_pl.runtime.console import say
from safemerge_pl.runtime.environment import environment
from safemerge_pl.runtime.files import write_figure, write_json, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from safemerge_pl.study import Study, StudyFigure

__all__ = ["Aggregate", "aggregate", "latex", "markdown", "write_study"]

Aggregate = dict[str, Any]
"""``row``, ``stream``, ``varied``, ``orders``, and ``mean`` and ``std`` by score and set."""


def aggregate(results: Sequence[dict[str, Any]]) -> list[Aggregate]:
    """Mean and sample standard deviation (ddof 1) over orders; H is computed per order, then averaged (METHODS 12).

    Args:
        results: one dictionary a cell, with ``row``, ``stream``, ``varied`` and the scores.

    Returns:
        One dictionary a row, stream and setting, in order of appearance. ``std`` is empty with one order.

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
        for extra in ("fold_seconds", "solve_seconds", "peak_memory_mib", "iterations"):
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


def table_rows(study: "Study", *, plus_minus: str) -> list[list[str]]:
    """Cells of the table: name, then four scores and the named sets a stream, then overhead."""
    found, columns = aggregate(study.results), (*SCORES, *study.sets)
    names = list(dict.fromkeys((entry["row"], repr(entry["varied"])) for entry in found))
    rows = []
    for reference in ("Pre-trained", "Individual"):
        if all(reference in study.references[stream] for stream in study.streams):
            cells = [reference]
            for stream in study.streams:
                row = study.references[stream][reference]
                cells += [_cell({**row["accuracies"], **row}.get(score), None, "") for score in columns]
            rows.append(cells + [""] * (4 if study.overhead else 0))
    for label, varied in names:
        entries = {e["stream"]: e for e in found if (e["row"], repr(e["varied"])) == (label, varied)}
        settings = next(iter(entries.values()))["varied"]
        cells = [label + "".join(f", {key}={value}" for key, value in settings.items())]
        for stream in study.streams:
            entry = entries.get(stream, {"mean": {}, "std": {}})
            cells += [_cell(entry["mean"].get(score), entry["std"].get(score), plus_minus) for score in columns]
        if study.overhead:
            mean = next(iter(entries.values()))["mean"]
            solve = f"{mean['solve_seconds']:.2f}" if mean.get("solve_seconds") else "-"
            cells += [f"{mean['iterations']:.0f}" if "iterations" in mean else "-", solve]
            memory = f"{mean['peak_memory_mib']:.0f}" if "peak_memory_mib" in mean else "-"
            cells += [f"{mean['fold_seconds']:.2f}", memory]
        rows.append(cells)
    return rows


def markdown(study: "Study") -> str:
    """The table as Markdown; percent, mean ± standard deviation over orders."""
    orders = ", ".join(str(order) for order in study.orders)
    heads = [f"{score} ({stream})" for stream in study.streams for score in (*SCORES, *study.sets)]
    heads += ["iterations", "solving s/task", "total s/task", "peak MiB/fold"] if study.overhead else []
    lines = [f"# {study.title}", "", f"Percent; orders {orders}; ± is the sample standard deviation.", ""]
    lines += ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    lines += ["| " + " | ".join(row) + " |" for row in table_rows(study, plus_minus=" ± ")]
    lines += [f"\n![{figure.title or figure.file}]({figure.file})" for figure in study.figures]
    lines += ["", ", ".join(f"{key} {value}" for key, value in environment().items())]
    return "\n".join(lines) + "\n"


def latex(study: "Study") -> str:
    """The table as a LaTeX ``tabular`` for ``booktabs``."""
    scores = (*SCORES, *study.sets)
    columns = len(study.streams) * len(scores) + (4 if study.overhead else 0)
    heads = [_escape(score) for _ in study.streams for score in scores]
    heads += ["Iters.", "Solv. (s)", "Tot. (s)", "Mem. (MiB)"] if study.overhead else []
    groups = " & ".join(rf"\multicolumn{{{len(scores)}}}{{c}}{{{stream} tasks}}" for stream in study.streams)
    lines = [
        rf"\begin{{tabular}}{{l{'r' * columns}}}",
        r"\toprule",
        rf" & {groups} \\",
        "Method & " + " & ".join(heads),
    ]
    lines[-1] += r" \\"
    lines.append(r"\midrule")
    lines += [" & ".join(_escape(cell) for cell in row) + r" \\" for row in table_rows(study, plus_minus=r"$\pm$")]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def write_study(study: "Study") -> None:
    """Write ``table.md``, ``table.tex``, ``study.json`` and the figures into the study's folder."""
    found = aggregate(study.results)
    write_text(study.folder / "table.md", markdown(study))
    write_text(study.folder / "table.tex", latex(study))
    content = {"title": study.title, "orders": study.orders, "references": study.references, "aggregates": found}
    write_json(study.folder / "study.json", {**content, "cells": study.results, "environment": environment()})
    for figure in study.figures:
        _draw(study, figure, found)
    say(f"\n{markdown(study)}\ntables and figures: {study.folder}")


def _draw(study: "Study", figure: "StudyFigure", found: list[Aggregate]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = figure.rows or [row.label for row in study.rows if row.vary]
    canvas = Figure(figsize=(1 + 3.6 * len(figure.y), 3.4), layout="constrained")
    FigureCanvasAgg(canvas)
    panels = canvas.subplots(1, len(figure.y), squeeze=False)[0]
    for axes, score in zip(panels, figure.y, strict=True):
        for label in labels:
            for stream in study.streams:
                entries = [e for e in found if (e["row"], e["stream"]) == (label, stream)]
                name = label if len(study.streams) == 1 else f"{label}, {stream} tasks"
                _draw_line(axes, figure, score, entries, name)
        for stream, rows in study.references.items():
            row = rows.get("Pre-trained", {})
            value = row.get(score, row.get("accuracies", {}).get(score))
            if value is not None and score != "ACC" and figure.x not in SCORES:
                axes.axhline(100 * value, color="#6b7280", linestyle="--", linewidth=1)
                axes.annotate(
                    "pretrained", (0.02, 100 * value), xycoords=("axes fraction", "data"), fontsize=7, va="bottom"
                )
            if stream == next(iter(study.streams)):
                axes.set_ylabel(f"{score} (%)")
        axes.set_xlabel(f"{figure.x} (%)" if figure.x in SCORES else figure.x)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    canvas.suptitle(figure.title, fontsize=11)
    write_figure(study.folder / figure.file, canvas)


def _draw_line(axes: "Axes", figure: "StudyFigure", score: str, entries: list[Aggregate], name: str) -> None:
    """One row of the study: a curve over a setting with its spread, or a trade-off between two scores."""
    points = []
    for entry in entries:
        x = entry["mean"].get(figure.x) if figure.x in SCORES else entry["varied"].get(figure.x)
        if x is not None and score in entry["mean"]:
            points.append((x, 100 * entry["mean"][score], 100 * entry["std"].get(score, 0.0), entry["varied"]))
    if not points:
        return
    if figure.x in SCORES:
        (line,) = axes.plot([100 * p[0] for p in points], [p[1] for p in points], marker="o", label=name)
        for x, y, _, varied in points:
            text = ",".join(str(value) for value in varied.values())
            axes.annotate(text, (100 * x, y), textcoords="offset points", xytext=(3, 3), fontsize=7)
        line.set_markersize(4)
    else:
        points.sort(key=lambda point: point[0])
        axes.errorbar([p[0] for p in points], [p[1] for p in points], [p[2] for p in points], marker="o", label=name)


def _cell(mean: float | None, std: float | None, plus_minus: str) -> str:
    if mean is None:
        return "-"
    return f"{100 * mean:.1f}" + ("" if std is None else f"{plus_minus}{100 * std:.1f}")


def _escape(text: str) -> str:
    return text.replace("_", r"\_").replace("%", r"\%").replace("&", r"\&")
