"""What a run leaves behind, as plain rows, and its figures.

A *report* is a dictionary of plain values: ``tasks``, ``controls``, ``method``, ``references`` (name -> row) and
``steps`` (one row per merge). A row has ``ACC``, ``Gen``, ``H``, ``BWT`` where defined and ``accuracies`` by set, all
shares in [0, 1].
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from safemerge_pl.functional import SCORES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

__all__ = ["Report", "draw_matrix", "matrix_figure", "matrix_rows", "stream_figure"]

Report = dict[str, Any]
_BLUE, _RED, _GREEN, _GREY = "#2563eb", "#dc2626", "#059669", "#6b7280"


def matrix_rows(report: Report) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, dict[str, Any]]]]:
    """Rows of the accuracy matrix with their labels: the pretrained model and each merge; and other methods' ends."""
    rows = [("pretrained", report["references"]["pretrained"])] if "pretrained" in report["references"] else []
    rows += [(f"{step['step']}  + {step['task']}", step) for step in report["steps"]]
    return rows, list(report.get("compared", {}).items())


def draw_matrix(
    axes: "Axes", report: Report, *, line: float, type_size: Callable[[float], float] | None
) -> "AxesImage":
    """Draw the accuracy matrix as a heat map with a number in each cell.

    Args:
        axes: where to draw; labels are the caller's.
        report: see :mod:`safemerge_pl.reports.stream`.
        line: points of the white lines before the control sets and before other methods.
        type_size: points of a cell's number, by its percent; ``None`` writes no numbers.

    Returns:
        The heat map, for a colour bar.
    """
    names = [*report["tasks"], *report["controls"]]
    own, others = matrix_rows(report)
    values = [[100 * row["accuracies"].get(name, float("nan")) for name in names] for _, row in (*own, *others)]
    image = axes.imshow(values or [[float("nan")] * len(names)], cmap="viridis", vmin=0, vmax=100, aspect="auto")
    if report["controls"]:
        axes.axvline(len(report["tasks"]) - 0.5, color="white", linewidth=line)
    if others:
        axes.axhline(len(own) - 0.5, color="white", linewidth=line)
    if type_size is None:
        return image
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value == value:
                shade = "black" if value > 60 else "white"
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=shade, fontsize=type_size(value))
    return image


def matrix_figure(report: Report) -> "Figure":
    """Heat map: accuracy of every set after every merge, the pretrained model as row 0."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [*report["tasks"], *report["controls"]]
    rows = [name for part in matrix_rows(report) for name, _ in part]
    figure = Figure(figsize=(2.6 + 0.72 * len(names), 1.9 + 0.42 * max(len(rows), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = draw_matrix(axes, report, line=3, type_size=lambda _: 8)
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_title(f"Accuracy after each merge (%), {report['method']['name']}", fontsize=11)
    axes.set_xlabel("merged tasks, then held-out control sets" if report["controls"] else "merged tasks")
    figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
    return figure


def stream_figure(report: Report) -> "Figure":
    """ACC, Gen. and H over the number of merged tasks, and BWT below.

    The pretrained model's Gen. and H are dashed lines; where other methods end is marked at the right.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    colours = dict(zip(SCORES, (_BLUE, _GREEN, _RED, _GREY), strict=True))
    for column, marker in zip(SCORES, "os^D", strict=True):
        points = [(step["step"], 100 * step[column]) for step in report["steps"] if column in step]
        if points:
            panel = below if column == "BWT" else axes
            panel.plot(*zip(*points, strict=True), color=colours[column], marker=marker, label=column)
    pretrained = report["references"].get("pretrained", {})
    for column in ("Gen", "H"):
        if column in pretrained:
            label = f"{column}, pretrained"
            axes.axhline(100 * pretrained[column], color=colours[column], linestyle="--", linewidth=1, label=label)
    _mark_others(axes, report, colours["H"])
    below.axhline(0, color=_GREY, linewidth=0.8)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_xlabel("merged tasks")
    below.set_ylabel("BWT (points)")
    axes.set_ylabel("%")
    axes.set_title(f"Merge stream, {report['method']['name']}", fontsize=11)
    for panel in (axes, below):
        panel.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(ncols=5, fontsize=8, loc="lower center")
    axes.set_ylim(bottom=0)
    return figure


def _mark_others(axes: "Axes", report: Report, colour: str) -> None:
    """The H with which other methods end, each with its name, spread so that the names do not cover each other."""
    found = sorted((100 * row["H"], name) for name, row in report.get("compared", {}).items() if "H" in row)
    end, low = len(report["steps"]), float("-inf")
    for value, name in found:
        low = max(value, low + 2.2)
        axes.plot(end, value, marker="x", color=colour, linestyle="none")
        axes.annotate(
            f"H, {name}",
            (end, value),
            xytext=(1.01, low),
            textcoords=("axes fraction", "data"),
            fontsize=7,
            va="center",
        )
