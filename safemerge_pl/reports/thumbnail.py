"""The accuracy matrix at the size of a card in TensorBoard."""

from typing import TYPE_CHECKING

from safemerge_pl.reports.stream import Report, draw_matrix, matrix_rows

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
    heads = [*(str(number + 1) for number in range(len(tasks))), *letters]
    rows = [name for part in matrix_rows(report) for name, _ in part]
    labels = [_cut(name.replace("  + ", " "), 20 if len(heads) < 15 else 15) for name in rows]
    left, above, below = 0.12 + 0.065 * max(map(len, labels), default=0), 0.2, 0.05 + 0.13 * len(controls)
    height = (0.17 if len(rows) < 16 else 0.14) * max(len(rows), 1) + above + below
    figure = Figure(figsize=(_WIDTH, height), dpi=200)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((left / _WIDTH, below / height, 1 - (left + 0.03) / _WIDTH, 1 - (above + below) / height))
    size = min(7.5, 48 * (_WIDTH - left) / max(len(heads), 1))  # two digits are about 1.2 of it wide: some room stays
    every = max(1, round(_LEGIBLE / size))
    sizes = (lambda value: size if value < 99.5 else 0.66 * size) if size >= _LEGIBLE else None
    draw_matrix(axes, report, line=2, type_size=sizes)
    _label(axes, [head if x % every == 0 else "" for x, head in enumerate(heads)], labels, min(7.0, size * every))
    for number, (letter, name) in enumerate(zip(letters, controls, strict=True), 1):
        figure.text(left / _WIDTH, (below - 0.13 * number) / height, f"{letter}: {_cut(name, 48)}", fontsize=6.5)
    return figure


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
