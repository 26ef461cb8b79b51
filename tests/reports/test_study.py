"""Tables and figures of a study, from plain results."""

import json
from pathlib import Path
from typing import Any

import pytest

from safemerge_pl.reports.study import StudyFigure, StudyResults, aggregate, latex, markdown, write_study


def cell(row: str, order: int, acc: float, **varied: Any) -> dict[str, Any]:
    scores = {"ACC": acc, "Gen": 0.5, "H": acc / (acc + 0.5)}
    return {"row": row, "stream": "8", "order": order, "varied": varied, "accuracies": {"x_1": acc}, **scores}


def results(**changes: Any) -> StudyResults:
    cells = [cell("plain", order, acc) for order, acc in ((42, 0.2), (43, 0.4))]
    cells += [cell("tried", order, r / 2, ratio=r) for order in (42, 43) for r in (0.5, 1.0)]
    references = {"8": {"Pre-trained": {"accuracies": {"x_1": 0.1}, "ACC": 0.1, "Gen": 0.6, "H": 0.12 / 0.7}}}
    settings: dict[str, Any] = {"title": "T", "streams": ["8"], "orders": [42, 43], "varied": ["tried"]}
    return StudyResults(**(settings | {"cells": cells, "references": references} | changes))


def test_spread_is_over_orders_with_one_degree_of_freedom_less() -> None:
    """H is computed per order and then averaged; std of [0.2, 0.4, 0.9] is sqrt(0.13)."""
    cells = [
        {
            "row": "a",
            "stream": "8",
            "varied": {},
            "accuracies": {"x": v},
            "ACC": v,
            "Gen": 0.5,
            "H": v * 1.0 / (v + 0.5),
        }
        for v in (0.2, 0.4, 0.9)
    ]
    (found,) = aggregate(cells)
    assert found["mean"]["ACC"] == pytest.approx(0.5)
    assert found["std"]["ACC"] == pytest.approx(0.13**0.5)
    assert found["mean"]["H"] == pytest.approx((0.2 / 0.7 + 0.4 / 0.9 + 0.9 / 1.4) / 3)
    assert aggregate(cells[:1])[0]["std"] == {}


def test_the_markdown_table_in_percent() -> None:
    lines = markdown(results(sets=["x_1"])).splitlines()
    assert lines[4] == "| | ACC (8) | Gen (8) | H (8) | BWT (8) | x_1 (8) |"
    assert lines[6:10] == [
        "| Pre-trained | 10.0 | 60.0 | 17.1 | - | 10.0 |",
        "| plain | 30.0 ± 14.1 | 50.0 ± 0.0 | 36.5 ± 11.2 | - | 30.0 ± 14.1 |",
        "| tried, ratio=0.5 | 25.0 ± 0.0 | 50.0 ± 0.0 | 33.3 ± 0.0 | - | 25.0 ± 0.0 |",
        "| tried, ratio=1.0 | 50.0 ± 0.0 | 50.0 ± 0.0 | 50.0 ± 0.0 | - | 50.0 ± 0.0 |",
    ]


def test_the_latex_table_escapes_names() -> None:
    text = latex(results(sets=["x_1"]))
    assert r"Method & ACC & Gen & H & BWT & x\_1 \\" in text
    assert r"plain & 30.0$\pm$14.1 & 50.0$\pm$0.0 & " in text


def test_overhead_that_was_not_measured_is_a_dash() -> None:
    timed = [cell("plain", 42, 0.2) | {"fold_seconds": 1.5, "solve_seconds": 0.0}]
    line = markdown(results(cells=timed, overhead=True)).splitlines()[7]
    assert line == "| plain | 20.0 | 50.0 | 28.6 | - | - | - | 1.50 | - |"


def test_files_and_figures(tmp_path: Path) -> None:
    figures = [StudyFigure("curve.png", "ratio", ["ACC", "x_1"]), StudyFigure("trade.png", "Gen", ["ACC"], title="t")]
    write_study(results(figures=figures), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "table.md",
        "table.tex",
        "study.json",
        "curve.png",
        "trade.png",
    }
    content = json.loads((tmp_path / "study.json").read_text())
    assert content["orders"] == [42, 43]
    assert [entry["row"] for entry in content["aggregates"]] == ["plain", "tried", "tried"]
    assert len(content["cells"]) == 6
    assert "![t](trade.png)" in (tmp_path / "table.md").read_text()
