"""Tables, figures and files of a run."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from safemerge_pl.reports.stream import (
    console_table,
    markdown,
    matrix_figure,
    stream_figure,
    table_rows,
)


def row(acc: float, gen: float, bwt: float | None = None, **accuracies: float) -> dict[str, Any]:
    found: dict[str, Any] = {"ACC": acc, "Gen": gen, "H": 2 * acc * gen / (acc + gen), "accuracies": accuracies}
    return found if bwt is None else found | {"BWT": bwt}


def step(number: int, task: str, values: dict[str, Any]) -> dict[str, Any]:
    return values | {"step": number, "task": task, "kept_fraction": 0.5, "fold_seconds": 1.25, "score_seconds": 3.5}


@pytest.fixture
def report() -> dict[str, Any]:
    return {
        "method": {"name": "SAFE-Merge", "settings": {"keep_ratio": 0.5, "lr": 0.001}},
        "tasks": ["mnist", "flags"],
        "controls": ["probe"],
        "references": {
            "pretrained": row(0.2, 0.6, mnist=0.15, flags=0.25, probe=0.6),
            "individual": row(0.95, 0.1, mnist=0.97, flags=0.93, probe=0.1),
        },
        "steps": [
            step(1, "mnist", row(0.9, 0.5, mnist=0.9, probe=0.5)),
            step(2, "flags", row(0.75, 0.4, -0.2, mnist=0.7, flags=0.8, probe=0.4)),
        ],
        "command": "safemerge fit",
        "seconds": 12.5,
        "merged": "0a1b2c",
        "environment": {"python": "3.11", "torch": "2.14"},
    }


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table(text: str, first: str) -> dict[str, list[str]]:
    """Rows of the Markdown table whose header starts with ``first``, by their first cell."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    found = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        assert len(cells(line)) == len(cells(lines[start])), line
        found[cells(line)[0]] = cells(line)[1:]
    return found


def test_the_closing_table_has_references_and_the_last_merge(report: dict[str, Any]) -> None:
    assert [name for name, _ in table_rows(report)] == ["Pre-trained", "Individual", "SAFE-Merge"]
    assert table_rows(report)[2][1] is report["steps"][1]
    assert table_rows(report | {"steps": [], "references": {}}) == []


def test_markdown_tables_hold_every_number_in_percent(report: dict[str, Any]) -> None:
    text = markdown(report)
    closing = table(text, "| | Pre-trained")
    assert closing["**ACC**"] == ["20.0", "95.0", "75.0"]
    assert closing["**Gen**"] == ["60.0", "10.0", "40.0"]
    assert closing["**H**"] == ["30.0", "18.1", "52.2"]
    assert closing["**BWT**"] == ["-", "-", "-20.0"]
    assert closing["mnist"] == ["15.0", "97.0", "70.0"]
    assert closing["flags"] == ["25.0", "93.0", "80.0"]
    assert closing["probe"] == ["60.0", "10.0", "40.0"]
    stream = table(text, "| # | task")
    assert stream["1"] == ["mnist", "90.0", "90.0", "50.0", "64.3", "-", "50.0", "1.25", "3.5"]
    assert stream["2"] == ["flags", "80.0", "75.0", "40.0", "52.2", "-20.0", "50.0", "1.25", "3.5"]
    for part in (
        "# SAFE-Merge on 2 tasks",
        "keep_ratio=0.5, lr=0.001",
        "- command: safemerge fit",
        "torch 2.14",
        "0a1b2c",
    ):
        assert part in text
    assert not re.search(r"\bnan\b|None", text, re.IGNORECASE)


def test_markdown_works_before_anything_was_merged(report: dict[str, Any]) -> None:
    """A run that stopped at its first task, without references and controls."""
    text = markdown(report | {"steps": [], "references": {}, "controls": []})
    assert "# SAFE-Merge on 2 tasks" in text


def test_a_set_that_was_not_scored_is_a_dash(report: dict[str, Any]) -> None:
    del report["steps"][1]["accuracies"]["probe"], report["steps"][1]["Gen"], report["steps"][1]["H"]
    closing = table(markdown(report), "| | Pre-trained")
    assert closing["probe"][2] == closing["**Gen**"][2] == closing["**H**"][2] == "-"


def test_the_console_table_shows_the_same_numbers(report: dict[str, Any]) -> None:
    console = Console(width=100, file=io.StringIO())
    console.print(console_table(report))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "SAFE-Merge: 2 of 2 tasks merged" in text
    for name, values in (
        ("ACC", "20.0 95.0 75.0"),
        ("BWT", "- - -20.0"),
        ("flags", "25.0 93.0 80.0"),
        ("probe", "60.0 10.0 40.0"),
    ):
        line = next(line for line in text.splitlines() if f" {name} " in line)
        assert re.sub(r"[^\d.\- ]", " ", line).split() == values.split()


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


def test_other_methods_have_a_column_a_row_and_a_mark(report: dict[str, Any]) -> None:
    report["compared"] = {"Task Arithmetic": row(0.25, 0.1, mnist=0.3, flags=0.2, probe=0.1)}
    assert [name for name, _ in table_rows(report)][-1] == "Task Arithmetic"
    assert "| **ACC** |" in markdown(report)
    assert "Task Arithmetic |" in markdown(report).splitlines()[4]
    axes = matrix_figure(report).axes[0]
    assert axes.get_yticklabels()[-1].get_text() == "Task Arithmetic"
    texts = [text.get_text() for text in stream_figure(report).axes[0].texts]
    assert texts == ["H, Task Arithmetic"]


def test_what_is_deployed_has_a_column_where_a_bound_holds(report: dict[str, Any]) -> None:
    assert "deployed" not in markdown(report)
    report["steps"][-1] |= {"response": 0.07, "scale": 0.5}
    lines = markdown(report).splitlines()
    head = next(line for line in lines if line.startswith("| # |"))
    assert "| kept | deployed | fold s |" in head
    last = next(line for line in lines if line.startswith(f"| {len(report['steps'])} |"))
    assert "| 50.0 | 50.0 |" in last
