"""Figures of a run."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from safemerge_pl.reports.stream import matrix_figure, stream_figure


def ticks(figure: Figure, axis: str) -> list[str]:
    return [label.get_text() for label in getattr(figure.axes[0], f"get_{axis}ticklabels")()]


def test_the_matrix_has_a_row_a_merge_and_a_column_a_set(report: dict[str, Any]) -> None:
    figure = matrix_figure(report)
    assert len(figure.axes) == 2  # the matrix and its colour bar
    assert ticks(figure, "x") == ["mnist", "flags", "probe"]
    assert ticks(figure, "y") == ["pretrained", "1  + mnist", "2  + flags"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["15", "25", "60", "90", "50", "70", "80", "40"]
    assert figure.axes[0].images[0].get_array().shape == (3, 3)
    assert "SAFE-Merge" in figure.axes[0].get_title()
    assert figure.axes[0].get_xlabel() == "merged tasks, then held-out control sets"
    assert len(figure.axes[0].lines) == 1  # between tasks and control sets
    report["controls"] = []
    alone = matrix_figure(report).axes[0]
    assert (alone.get_xlabel(), len(alone.lines)) == ("merged tasks", 0)


def test_the_stream_has_a_line_a_number_and_the_pretrained_levels(report: dict[str, Any]) -> None:
    above, below = stream_figure(report).axes
    lines = {str(line.get_label()): line for line in above.lines}
    assert list(lines) == ["ACC", "Gen", "H", "Gen, pretrained", "H, pretrained"]
    assert list(lines["ACC"].get_xdata()) == [1, 2]
    assert list(lines["ACC"].get_ydata()) == pytest.approx([90, 75])
    assert list(lines["Gen, pretrained"].get_ydata()) == pytest.approx([60, 60])
    assert "BWT" in [line.get_label() for line in below.lines]
    assert (below.get_xlabel(), above.get_ylabel()) == ("merged tasks", "%")


@pytest.mark.parametrize("draw", [matrix_figure, stream_figure])
@pytest.mark.parametrize("kind", ["whole", "no references", "no controls", "no steps", "nothing"])
def test_figures_can_be_written_whatever_is_missing(
    draw: Any, kind: str, report: dict[str, Any], tmp_path: Path
) -> None:
    """A merge that was not scored draws nothing, without a warning."""
    if kind in ("no references", "nothing"):
        report["references"] = {}
    if kind in ("no controls", "nothing"):
        report["controls"] = []
    if kind in ("no steps", "nothing"):
        report["steps"] = []
    draw(report).savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_other_methods_have_a_row_and_a_mark(report: dict[str, Any]) -> None:
    report["compared"] = {"Task Arithmetic": report["references"]["individual"]}
    axes = matrix_figure(report).axes[0]
    assert axes.get_yticklabels()[-1].get_text() == "Task Arithmetic"
    texts = [text.get_text() for text in stream_figure(report).axes[0].texts]
    assert texts == ["H, Task Arithmetic"]
