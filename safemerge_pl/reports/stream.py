"""What a run leaves behind: tables, figures and machine-readable files, from plain rows.

A *report* is a dictionary of plain values: ``tasks``, ``controls``, ``method``, ``references`` (name -> row) and
``steps`` (one row per merge). A row has ``ACC``, ``Gen``, ``H``, ``BWT`` where defined and ``accuracies`` by set, all
shares in [0, 1].
"""

from typing import TYPE_CHECKING, Any

from safemerge_pl.functional import SCORES

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["console_table", "markdown", "matrix_figure", "stream_figure"]

Report = dict[str, Any]
_BLUE, _RED, _GREEN, _GREY = "#2563eb", "#dc2626", "#059669", "#6b7280"


def table_rows(report: Report) -> list[tuple[str, dict[str, Any]]]:
    """The rows of the closing table: pretrained, individual, and the merge after its last task."""
    names = {"pretrained": "Pre-trained", "individual": "Individual"}
    rows = [(names.get(key, key), row) for key, row in report["references"].items()]
    if report["steps"]:
        rows.append((report["method"]["name"], report["steps"][-1]))
    return rows


def console_table(report: Report) -> "Table":
    """The closing table for the terminal; percent."""
    from rich.table import Table

    count = len(report["steps"])
    table = Table(title=f"{report['method']['name']}: {count} of {len(report['tasks'])} tasks merged (accuracy in %)")
    rows = table_rows(report)
    table.add_column("")
    for name, _ in rows:
        table.add_column(name, justify="right")
    for column in SCORES:
        table.add_row(column, *(_percent(row.get(column)) for _, row in rows), style="bold")
    for kind in ("tasks", "controls"):
        table.add_section()
        for name in report[kind]:
            table.add_row(name, *(_percent(row["accuracies"].get(name)) for _, row in rows))
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
    lines += ["", "## After each merge", "", "| # | task | own | ACC | Gen | H | BWT | kept | fold s | score s |"]
    lines.append("|---:|---|" + "---:|" * 8)
    for step in report["steps"]:
        cells = [_percent(step["accuracies"].get(step["task"])), *(_percent(step.get(column)) for column in SCORES)]
        cells += [_percent(step["kept_fraction"]), f"{step['fold_seconds']:.2f}", f"{step['score_seconds']:.1f}"]
        lines.append(f"| {step['step']} | {step['task']} | " + " | ".join(cells) + " |")
    lines += ["", "![accuracy matrix](matrix.png)", "", "![stream](stream.png)", "", "## How it was made", ""]
    settings = ", ".join(f"{key}={value}" for key, value in report["method"]["settings"].items())
    lines.append(f"- settings: {settings}")
    lines += [f"- {key}: {report[key]}" for key in ("command", "seconds", "peak_memory_mib", "merged") if key in report]
    lines.append("- " + ", ".join(f"{key} {value}" for key, value in report["environment"].items()))
    return "\n".join(lines) + "\n"


def matrix_figure(report: Report) -> "Figure":
    """Heat map: accuracy of every set after every merge, the pretrained model as row 0."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [*report["tasks"], *report["controls"]]
    rows = [("pretrained", report["references"]["pretrained"])] if "pretrained" in report["references"] else []
    rows += [(f"{step['step']}  + {step['task']}", step) for step in report["steps"]]
    values = [[100 * row["accuracies"].get(name, float("nan")) for name in names] for _, row in rows]
    figure = Figure(figsize=(2.6 + 0.72 * len(names), 1.9 + 0.42 * max(len(rows), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(values or [[float("nan")] * len(names)], cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    if report["controls"]:
        axes.axvline(len(report["tasks"]) - 0.5, color="white", linewidth=3)
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if value == value:
                shade = "black" if value > 60 else "white"
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=shade, fontsize=8)
    axes.set_title(f"Accuracy after each merge (%), {report['method']['name']}", fontsize=11)
    axes.set_xlabel("merged tasks, then held-out control sets" if report["controls"] else "merged tasks")
    figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
    return figure


def stream_figure(report: Report) -> "Figure":
    """ACC, Gen. and H over the number of merged tasks, with the pretrained model's Gen. as reference."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for column, colour, marker in zip(SCORES[:3], (_BLUE, _GREEN, _RED), "os^", strict=True):  # BWT has another scale
        points = [(step["step"], 100 * step[column]) for step in report["steps"] if column in step]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=column)
    pretrained = report["references"].get("pretrained", {})
    if "Gen" in pretrained:
        axes.axhline(100 * pretrained["Gen"], color=_GREY, linestyle="--", linewidth=1, label="Gen, pretrained")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("merged tasks")
    axes.set_ylabel("%")
    axes.set_title(f"Merge stream, {report['method']['name']}", fontsize=11)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(ncols=4, fontsize=8, loc="lower center")
    axes.set_ylim(bottom=0)
    return figure


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
