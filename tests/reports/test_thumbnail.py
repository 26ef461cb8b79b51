"""The accuracy matrix as a small picture."""

from itertools import pairwise
from typing import Any

import pytest

from safemerge_pl.reports.thumbnail import thumbnail_figure


def report(tasks: int, controls: int = 2, *, merged: int | None = None, others: int = 0) -> dict[str, Any]:
    names, held = [f"a_rather_long_task_{n}" for n in range(tasks)], [f"control_{n}" for n in range(controls)]
    whole = {"accuracies": dict.fromkeys([*names, *held], 0.25)}
    steps = [
        {"step": n, "task": names[n - 1], "accuracies": dict.fromkeys(names[:n], 1.0) | dict.fromkeys(held, 0.5)}
        for n in range(1, 1 + (tasks if merged is None else merged))
    ]
    compared = {f"method {n}": whole for n in range(others)}
    return {
        "tasks": names,
        "controls": held,
        "references": {"pretrained": whole},
        "steps": steps,
        "compared": compared,
    }


@pytest.mark.parametrize("tasks", [1, 3, 8, 14, 20])
def test_no_number_or_name_touches_another(tasks: int) -> None:
    """In the picture as a card shows it, and all of it inside of the picture."""
    figure = thumbnail_figure(report(tasks, others=1))
    figure.set_dpi(100)
    figure.canvas.draw()
    axes = figure.axes[0]
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    texts = [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels(), *figure.texts]
    boxes = [text.get_window_extent(renderer) for text in texts if text.get_text()]
    assert len(boxes) > (tasks + 2) * (tasks + 1) / 2
    width, height = figure.get_size_inches() * 100
    for box in boxes:
        assert -1 <= box.x0 < box.x1 <= width + 1, (box, width)
        assert -1 <= box.y0 < box.y1 <= height + 1, (box, height)
    rows: dict[int, list[Any]] = {}
    for text in axes.texts:
        rows.setdefault(int(text.get_position()[1]), []).append(text.get_window_extent(renderer))
    for row in rows.values():
        row.sort(key=lambda box: box.x0)
        assert all(left.x1 < right.x0 for left, right in pairwise(row))
    assert min(text.get_fontsize() for text in axes.texts) >= 3  # "100"; all else is at least 4
    assert height < 420


def test_what_cannot_be_read_is_left_out() -> None:
    figure = thumbnail_figure(report(60, 0, merged=1))
    assert not list(figure.axes[0].texts)
    heads = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert 0 < sum(bool(head) for head in heads) < 60


@pytest.mark.parametrize("content", [report(2, merged=0), report(2, 0), report(1, 30), {**report(2), "references": {}}])
def test_it_is_drawn_whatever_is_missing(content: dict[str, Any]) -> None:
    thumbnail_figure({**content, "steps": content["steps"][:1]}).canvas.draw()


def test_rows_name_the_tasks_and_lines_below_the_control_sets() -> None:
    figure = thumbnail_figure(report(2, others=1))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "pretrained",
        "1 a_rather_long_tas…",
        "2 a_rather_long_tas…",
        "method 0",
    ]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1", "2", "a", "b"]
    assert [text.get_text() for text in figure.texts] == ["a: control_0", "b: control_1"]
