"""Tables of a run, on the terminal and in Markdown."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from safemerge_pl.reports.tables import console_table, markdown, table_rows


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


def on_console(report: dict[str, Any], width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(console_table(report, width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_the_console_table_shows_the_same_numbers(report: dict[str, Any]) -> None:
    title, *lines = on_console(report, 100)
    assert title.strip() == "SAFE-Merge: 2 of 2 tasks merged (accuracy in %)"
    for name, values in (
        ("ACC", "20.0 95.0 75.0"),
        ("BWT", "- - -20.0"),
        ("flags", "25.0 93.0 80.0"),
        ("probe", "60.0 10.0 40.0"),
    ):
        line = next(line for line in lines if line.startswith(f"{name} "))
        assert line.replace("│", " ").split() == [name, *values.split()]


LABELS = ["SAFE-Merge, unbounded", "SAFE-Share, bound 0.035", "Task Arithmetic", "WUDI-Merging"]


@pytest.mark.parametrize(("width", "tables"), [(60, 3), (80, 2), (100, 1), (120, 1), (160, 1)])
def test_no_word_is_cut_at_any_width(report: dict[str, Any], width: int, tables: int) -> None:
    """Columns that do not fit stand in a further table; headings are broken between words and at hyphens alone."""
    report["method"]["name"] = "SAFE-Merge, bound 0.035"
    report["tasks"] = ["mnist", "probe2_unseen_vendors"]
    report["compared"] = {name: {"ACC": n / 10, "accuracies": {}} for n, name in enumerate(LABELS, 1)}
    lines = on_console(report, width)
    assert max(map(len, lines)) <= width
    parts = [part.split("\n") for part in "\n".join(lines[1:]).split("\n\n")]
    assert len(parts) == tables
    heads, scores = list[str](), list[str]()
    for part in parts:
        rule = next(n for n, line in enumerate(part) if "╇" in line)
        cells = [[cell.strip() for cell in line.split("┃")] for line in part[:rule]]
        heads += [" ".join(filter(None, column)).replace("- ", "-") for column in list(zip(*cells, strict=True))[1:]]
        scores += part[rule + 1].replace("│", " ").split()[1:]
        assert "probe2_unseen_vendors" in "\n".join(part)
    assert heads == ["Pre-trained", "Individual", "SAFE-Merge, bound 0.035", *LABELS]
    assert scores == ["20.0", "95.0", "75.0", "10.0", "20.0", "30.0", "40.0"]


def test_names_are_printed_as_they_are_and_in_parts_where_nothing_else_fits(report: dict[str, Any]) -> None:
    method, task = "[a]_word_of_thirty_characters_", "task_[red]_of_thirty_characters"
    report["compared"] = {method: {"accuracies": {}}}
    report["tasks"] = [task]
    wide, narrow = on_console(report, 120), on_console(report, 24)
    assert wide[1].endswith(method)
    assert any(line.startswith(f"{task} ") for line in wide)
    assert max(map(len, narrow)) <= 24
    columns = [re.split("[│┃]", line) for line in narrow]
    assert task in "".join(cells[0].strip() for cells in columns)
    assert method in "".join(cells[-1].strip() for cells in columns)


def test_other_methods_have_a_column(report: dict[str, Any]) -> None:
    report["compared"] = {"Task Arithmetic": report["references"]["individual"]}
    assert [name for name, _ in table_rows(report)][-1] == "Task Arithmetic"
    assert table(markdown(report), "| | Pre-trained")["**Gen**"] == ["60.0", "10.0", "40.0", "10.0"]


def test_what_is_deployed_has_a_column_where_a_bound_holds(report: dict[str, Any]) -> None:
    assert "deployed" not in markdown(report)
    report["steps"][-1] |= {"response": 0.07, "scale": 0.5}
    lines = markdown(report).splitlines()
    head = next(line for line in lines if line.startswith("| # |"))
    assert "| kept | deployed | fold s |" in head
    last = next(line for line in lines if line.startswith(f"| {len(report['steps'])} |"))
    assert "| 50.0 | 50.0 |" in last


def share(group: str, merged: float = 0.0, masked: float = 0.0, recovered: float = 0.0, left: float = 0.0) -> Any:
    return {"group": group, "merged": merged, "masked": masked, "recovered": recovered, "pretrained": left}


def test_what_became_of_the_task_vectors_by_task_and_by_group(report: dict[str, Any]) -> None:
    """Of a task all groups together; of a group the mean over those tasks of which it is known."""

    def rows(first: str) -> list[list[str]]:
        return [[name, *cells] for name, cells in table(markdown(report), first).items()][2:]

    assert "What became" not in markdown(report)
    first, second = report["steps"]
    first |= {"shares": [share("feed-forward in", 0.3, 0.4, 0.1), share("head", left=0.2)], "leading": 0.43}
    second |= {"shares": [share("attention in", 0.24, 0.12), share("feed-forward in", 0.5, 0.14)]}
    assert "leading directions |" in markdown(report)
    assert rows("| # | task | merged") == [
        ["1", "mnist", "30.0", "40.0", "10.0", "20.0", "43.0"],
        ["2", "flags", "74.0", "26.0", "-", "-", "-"],
    ]
    assert rows("| | merged | masked away | recovered | left pretrained | all |") == [
        ["attention in", "12.0", "6.0", "-", "-", "18.0"],
        ["feed-forward in", "40.0", "27.0", "5.0", "-", "72.0"],
        ["head", "-", "-", "-", "10.0", "10.0"],
    ]
    del first["leading"], second["shares"]
    assert "leading directions" not in markdown(report)
    assert rows("| # | task | merged")[1] == ["2", "flags", "-", "-", "-", "-"]
    assert rows("| | merged | masked")[-1] == ["head", "-", "-", "-", "20.0", "20.0"]


def test_the_notes_of_a_fold_stand_below_its_scores(report: dict[str, Any]) -> None:
    assert "Notes" not in markdown(report)
    report["steps"][0]["notes"] = []
    report["steps"][1]["notes"] = ["its head was trained", "it was folded before"]
    section = markdown(report).split("## Notes")[1].split("![")[0]
    assert section.split("\n") == ["", "", "- flags: its head was trained", "- flags: it was folded before", "", ""]
