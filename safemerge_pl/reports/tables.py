"""Tables of a run, for the terminal and in Markdown."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from safemerge_pl.architectures.groups import FATES, GROUPS, add_fates
from safemerge_pl.functional import SCORES
from safemerge_pl.reports.stream import Report

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

__all__ = ["console_table", "markdown", "scores_table", "table_rows"]

Steps = Sequence[Mapping[str, Any]]


def table_rows(report: Report) -> list[tuple[str, dict[str, Any]]]:
    """The rows of the closing table: pretrained, individual, the merge after its last task, and other methods."""
    names = {"pretrained": "Pre-trained", "individual": "Individual"}
    rows = [(names.get(key, key), row) for key, row in report["references"].items()]
    if report["steps"]:
        rows.append((report["method"]["name"], report["steps"][-1]))
    rows += report.get("compared", {}).items()
    return rows


def console_table(report: Report, width: int) -> "Group":
    """The closing table for the terminal; percent.

    Headings are broken between words and after hyphens where that is needed, and never within a word: columns for which
    there is no room beside the others stand in a further table.

    Args:
        report: see :mod:`safemerge_pl.reports.stream`.
        width: of the console, in characters.
    """
    from rich.cells import cell_len
    from rich.console import Group
    from rich.text import Text

    rows = table_rows(report)
    longest = max(cell_len(name) for name in (*SCORES, *report["tasks"], *report["controls"]))
    first = min(longest, width // 2)
    for count in range(1, len(rows) + 1):
        size = math.ceil(len(rows) / count)
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        heads = [_headings([name for name, _ in part], width - first) for part in parts]
        if all(heads):
            break
    done = f"{len(report['steps'])} of {len(report['tasks'])} tasks merged (accuracy in %)"
    tables = [_columns(report, part, lines, first) for part, lines in zip(parts, heads, strict=True)]
    return Group(
        Text(f"{report['method']['name']}: {done}", style="italic"),
        tables[0],
        *(each for table in tables[1:] for each in ("", table)),
    )


def _headings(names: Sequence[str], room: int) -> list[str]:
    """Headings in lines so short that all columns fit; none where a word would have to be cut."""
    from rich.cells import cell_len

    for longest in range(max(map(len, names)), 0, -1):
        heads = [textwrap.wrap(name, longest, break_long_words=False) for name in names]
        widths = [max(map(cell_len, ["-100.0", *lines])) for lines in heads]
        if sum(widths) + len(" | ") * len(names) <= room:
            return ["\n".join(lines) for lines in heads]
    return []


def _columns(report: Report, part: Sequence[tuple[str, Mapping[str, Any]]], heads: list[str], first: int) -> "Table":
    """A table with a column per row of the report, after one of ``first`` characters for the scores and sets."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("", width=first, overflow="fold")
    for head in heads or [name for name, _ in part]:
        table.add_column(Text(head), justify="right", overflow="fold")
    for score in SCORES:
        table.add_row(score, *(_percent(row.get(score)) for _, row in part), style="bold")
    if _has_drift(report):
        table.add_row("drift", *(_percent(row.get("drift")) for _, row in part))
    for kind in ("tasks", "controls"):
        table.add_section()
        for name in report[kind]:
            table.add_row(Text(name), *(_percent(row["accuracies"].get(name)) for _, row in part))
    return table


def scores_table(scores: Mapping[str, float]) -> "Table":
    """One evaluation for the terminal; percent.

    Args:
        scores: shares in [0, 1] by set, and ACC, Gen., H and BWT where defined.

    Example:
        >>> scores_table({"mnist": 0.5, "ACC": 0.5}).row_count
        2
    """
    from rich.table import Table
    from rich.text import Text

    table = Table("", "accuracy in %")
    table.columns[1].justify = "right"
    for name in (key for key in SCORES if key in scores):
        table.add_row(name, _percent(scores[name]), style="bold")
    table.add_section()
    for name in (key for key in scores if key not in SCORES):
        table.add_row(Text(name), _percent(scores[name]))
    return table


def markdown(report: Report) -> str:
    """The whole report as Markdown."""
    rows, steps = table_rows(report), report["steps"]
    lines = [f"# {report['method']['name']} on {len(report['tasks'])} tasks", "", "Accuracy in percent.", ""]
    closing = [(f"**{column}**", *(_percent(row.get(column)) for _, row in rows)) for column in SCORES]
    closing += [("drift", *(_percent(row.get("drift")) for _, row in rows))] if _has_drift(report) else []
    for name in (*report["tasks"], *report["controls"]):
        closing.append((name, *(_percent(row["accuracies"].get(name)) for _, row in rows)))
    lines += _table(["", *(name for name, _ in rows)], closing)
    lines += ["", "## After each merge", "", *_after_each_merge(steps)]
    notes = [f"- {step['task']}: {note}" for step in steps for note in step.get("notes", ())]
    lines += ["", "## Notes", "", *notes] if notes else []
    lines += ["", "![accuracy matrix](matrix.png)", "", "![stream](stream.png)", "", *_task_vectors(steps)]
    settings = ", ".join(f"{key}={value}" for key, value in report["method"]["settings"].items())
    lines += ["## How it was made", "", f"- settings: {settings}"]
    lines += [f"- {key}: {report[key]}" for key in ("command", "seconds", "peak_memory_mib", "merged") if key in report]
    lines.append("- " + ", ".join(f"{key} {value}" for key, value in report["environment"].items()))
    return "\n".join(lines) + "\n"


def _has_drift(report: Report) -> bool:
    """Whether anything was measured by a drift gauge; where a row has none, its cell stays empty."""
    return any("drift" in row for _, row in table_rows(report))


def _after_each_merge(steps: Steps) -> list[str]:
    """Scores, times, and what was kept, with a row per task."""
    bounded, gauged = any("scale" in step for step in steps), any("drift" in step for step in steps)
    rows = []
    for step in steps:
        cells = [_percent(step["accuracies"].get(step["task"])), *(_percent(step.get(column)) for column in SCORES)]
        cells += [_percent(step["kept_fraction"]), *([_percent(step.get("scale", 1.0))] if bounded else [])]
        cells += [_percent(step.get("drift"))] if gauged else []
        rows.append(
            [f"{step['step']}", step["task"], *cells, f"{step['fold_seconds']:.2f}", f"{step['score_seconds']:.1f}"]
        )
    heads = [
        "own",
        *SCORES,
        "kept",
        *(["deployed"] if bounded else []),
        *(["drift"] if gauged else []),
        "fold s",
        "score s",
    ]
    return _table(["#", "task", *heads], rows, words=1)


def _task_vectors(steps: Steps) -> list[str]:
    """What became of the task vectors: a row per task, and a row per group of tensors; nothing where nobody knows."""
    known = [step for step in steps if step.get("shares")]
    if not known:
        return []
    looked_at = any("leading" in step for step in steps)
    tasks = []
    for step in steps:
        whole = add_fates(step.get("shares", ()))
        cells = [_share(whole[fate]) for fate in FATES] + ([_percent(step.get("leading"))] if looked_at else [])
        tasks.append([f"{step['step']}", step["task"], *cells])
    groups = []
    for group in GROUPS:
        found = add_fates(part for step in known for part in step["shares"] if part["group"] == group)
        if any(found.values()):
            groups.append([group, *(_share(value / len(known)) for value in (*found.values(), sum(found.values())))])
    also = " The last column is how much of the change lies in the pretrained model's leading directions."
    return [
        "## What became of the task vectors",
        "",
        "Shares of each task vector's squared length, in percent. Recovered is what the method's correction makes up "
        f"for; left pretrained is what lies in tensors that the method does not merge.{also if looked_at else ''}",
        "",
        *_table(["#", "task", *FATES.values(), *(["leading directions"] if looked_at else [])], tasks, words=1),
        "",
        "By group of tensors, as a mean over the tasks:",
        "",
        *_table(["", *FATES.values(), "all"], groups),
        "",
    ]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 0) -> list[str]:
    """A table in Markdown, of numbers but for the column ``words``."""
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (heads, *rows)]
    return [lines[0], "|" + "".join("---|" if n == words else "---:|" for n in range(len(heads))), *lines[1:]]


def _share(value: float) -> str:
    return _percent(value or None)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
