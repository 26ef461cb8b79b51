"""The accuracy matrix at the size of a card in TensorBoard."""

from typing import TYPE_CHECKING

from safemerge_pl.reports.stream import Report, matrix_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["thumbnail_figure"]

_WIDTH = 3.5
"""Inches. A card shows the picture about 350 pixels wide, so a point of type is 1.4 pixels there."""
_LEGIBLE = 4.0
"""Points below which type is left out."""


def thumbnail_figure(report: Report) -> "Figure":
    """The heat map of :func:`~safemerge_pl.reports.stream.matrix_figure` for a small picture.

    Columns have the numbers of the tasks, whose names stand at the rows, and letters for the control sets, whose names
    stand below. There is no colour bar: each cell says its number.

    Args:
        report: see :mod:`safemerge_pl.reports.stream`.

    Returns:
        The figure, 3.5 inches wide and twice as sharp as a card shows it.

    Example:
        >>> step = {"step": 1, "task": "mnist", "accuracies": {"mnist": 0.9, "probe": 0.5}}
        >>> report = {"tasks": ["mnist"], "controls": ["probe"], "references": {}, "steps": [step]}
        >>> [text.get_text() for text in thumbnail_figure(report).axes[0].texts]
        ['90', '50']
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks, controls = report["tasks"], report["controls"]
    letters = [_letter(number) for number in range(len(controls))]
    names, heads = [*tasks, *controls], [*(str(number + 1) for number in range(len(tasks))), *letters]
    own, others = matrix_rows(report)
    rows = [*own, *others]
    labels = [_cut(name.replace("  + ", " "), 20 if len(names) < 15 else 15) for name, _ in rows]
    left, above, below = 0.12 + 0.065 * max(map(len, labels), default=0), 0.2, 0.05 + 0.13 * len(controls)
    height = (0.17 if len(rows) < 16 else 0.14) * max(len(rows), 1) + above + below
    figure = Figure(figsize=(_WIDTH, height), dpi=200)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((left / _WIDTH, below / height, 1 - (left + 0.03) / _WIDTH, 1 - (above + below) / height))
    values = [[100 * row["accuracies"].get(name, float("nan")) for name in names] for _, row in rows]
    axes.imshow(values or [[float("nan")] * len(names)], cmap="viridis", vmin=0, vmax=100, aspect="auto")
    size = min(7.5, 48 * (_WIDTH - left) / max(len(names), 1))  # two digits are about 1.2 of it wide: some room stays
    every = max(1, round(_LEGIBLE / size))
    _label(axes, [head if x % every == 0 else "" for x, head in enumerate(heads)], labels, min(7.0, size * every))
    if size >= _LEGIBLE:
        _write_numbers(axes, values, size)
    if controls:
        axes.axvline(len(tasks) - 0.5, color="white", linewidth=2)
    if others:
        axes.axhline(len(own) - 0.5, color="white", linewidth=2)
    for number, (letter, name) in enumerate(zip(letters, controls, strict=True), 1):
        figure.text(left / _WIDTH, (below - 0.13 * number) / height, f"{letter}: {_cut(name, 48)}", fontsize=6.5)
    return figure


def _write_numbers(axes: "Axes", values: list[list[float]], size: float) -> None:
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value == value:
                shade, points = "black" if value > 60 else "white", size if value < 99.5 else 0.66 * size
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=shade, fontsize=points)


def _label(axes: "Axes", heads: list[str], labels: list[str], size: float) -> None:
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(heads)), heads, fontsize=size)
    axes.set_yticks(range(len(labels)), labels, fontsize=6.5)
    axes.tick_params(length=0, pad=2)
    for side in axes.spines.values():
        side.set_visible(False)


def _letter(number: int) -> str:
    """``a`` to ``z``, then ``a1``, ``b1`` and so on.

    Example:
        >>> _letter(0), _letter(25), _letter(26)
        ('a', 'z', 'a1')
    """
    turn, place = divmod(number, 26)
    return chr(ord("a") + place) + (str(turn) if turn else "")


def _cut(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
