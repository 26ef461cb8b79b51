"""Tables of a run, for the terminal and in Markdown."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from safemerge_pl.functional import SCORES
from safemerge_pl.reports.stream import Report

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["console_table", "markdown", "scores_table", "table_rows"]


def table_rows(report: Report) -> list[tuple[str, dict[str, Any]]]:
    """The rows of the closing table: pretrained, individual, the merge after its last task, and other methods."""
    names = {"pretrained": "Pre-trained", "individual": "Individual"}
    rows = [(names.get(key, key), row) for key, row in report["references"].items()]
    if report["steps"]:
        rows.append((report["method"]["name"], report["steps"][-1]))
    rows += report.get("compared", {}).items()
    return rows


def console_table(report: Report) -> "Table":
    """The closing table for the terminal; percent."""
    from rich.table import Table

    count = len(report["steps"])
    title = f"{report['method']['name']}: {count} of {len(report['tasks'])} tasks merged (accuracy in %)"
    table = Table(title=title, min_width=min(len(title), 80))
    rows = table_rows(report)
    table.add_column("", no_wrap=True)
    for name, _ in rows:
        table.add_column(name, justify="right", overflow="fold")
    for column in SCORES:
        table.add_row(column, *(_percent(row.get(column)) for _, row in rows), style="bold")
    for kind in ("tasks", "controls"):
        table.add_section()
        for name in report[kind]:
            table.add_row(name, *(_percent(row["accuracies"].get(name)) for _, row in rows))
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

    table = Table("", "accuracy in %")
    table.columns[1].justify = "right"
    for name in (key for key in SCORES if key in scores):
        table.add_row(name, _percent(scores[name]), style="bold")
    table.add_section()
    for name in (key for key in scores if key not in SCORES):
        table.add_row(name, _percent(scores[name]))
    return table


def markdown(report: Report) -> str:
    """The whole report as Markdown."""
    rows = table_rows(report)
    lines = [f"# {report['method']['name']} on {len(report['tasks'])} tasks", "", "Accuracy in percent.", ""]
    lines += ["| | " + " | ".join(name for name, _ in rows) + " |", "|---|" + "---:|" * len(rows)]
    for column in SCORES:
        lines.append(f"| **{column}** | " + " | ".join(_percent(row.get(column)) for _, row in rows) + " |")
    for name in (*report["tasks"], *report["controls"]):
        lines.append(f"| {name} | " + " | ".join(_percent(row["accuracies"].get(name)) for _, row in rows) + " |")
    bounded = any("scale" in step for step in report["steps"])
    heads = ["own", *SCORES, "kept", *(["deployed"] if bounded else []), "fold s", "score s"]
    lines += ["", "## After each merge", "", f"| # | task | {' | '.join(heads)} |"]
    lines.append("|---:|---|" + "---:|" * len(heads))
    for step in report["steps"]:
        cells = [_percent(step["accuracies"].get(step["task"])), *(_percent(step.get(column)) for column in SCORES)]
        cells += [_percent(step["kept_fraction"]), *([_percent(step.get("scale", 1.0))] if bounded else [])]
        cells += [f"{step['fold_seconds']:.2f}", f"{step['score_seconds']:.1f}"]
        lines.append(f"| {step['step']} | {step['task']} | " + " | ".join(cells) + " |")
    lines += ["", "![accuracy matrix](matrix.png)", "", "![stream](stream.png)", "", "## How it was made", ""]
    settings = ", ".join(f"{key}={value}" for key, value in report["method"]["settings"].items())
    lines.append(f"- settings: {settings}")
    lines += [f"- {key}: {report[key]}" for key in ("command", "seconds", "peak_memory_mib", "merged") if key in report]
    lines.append("- " + ", ".join(f"{key} {value}" for key, value in report["environment"].items()))
    return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
