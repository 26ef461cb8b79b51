"""``python -m benchmarks PART ...``: figures for this machine; only ratios mean anything elsewhere.

literal      SAFE-Merge against Algorithm 1 written out literally
rivals       methods side by side, and against fusion_bench with ``--peer`` an interpreter that has it
scaling      growth with layers, width, tasks and ranks
processes    a fold shared out among two processes
out_of_core  models larger than memory, from disk to disk
together     the same by one process with one thread and by two, under torchrun
cost         a cost model fitted to small folds, and what it predicts for large ones (docs/scaling.md)
gpu          eight tasks of ViT-B/32 and ViT-L/14 shapes on a GPU, checked against the CPU
"""

import argparse
from pathlib import Path

import torch

from benchmarks.cost import cost
from benchmarks.gpu import gpu
from benchmarks.literal import literal
from benchmarks.out_of_core import out_of_core
from benchmarks.processes import processes
from benchmarks.rivals import rivals
from benchmarks.scaling import scaling
from benchmarks.together import together
from safemerge_pl.runtime.environment import environment
from safemerge_pl.runtime.files import write_json

PARTS = {
    "literal": literal,
    "rivals": rivals,
    "scaling": scaling,
    "processes": processes,
    "out_of_core": out_of_core,
    "together": together,
    "cost": cost,
    "gpu": gpu,
}


def table(rows: list[dict[str, object]]) -> str:
    """Rows as Markdown.

    Example:
        >>> print(table([{"a": 1, "b": 2.345}]))
        | a | b |
        |---|---|
        | 1 | 2.35 |
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in (row.get(key, "") for key in keys)]
        for row in rows
    ]
    return (
        "\n".join(f"| {' | '.join(row)} |" for row in [keys, ["---"] * len(keys), *cells])
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def main() -> None:
    """Measure the parts that are asked for, print their tables, write them to ``benchmarks/results.json``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["literal"], choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--width", type=int, default=256, help="d_in; 768 is ViT-B/32 (the literal form takes minutes)")
    parser.add_argument("--layers", type=int, default=6, help="literal: square matrices")
    parser.add_argument("--blocks", type=int, default=12, help="rivals, processes: transformer blocks")
    parser.add_argument("--steps", type=int, default=50, help="rivals: steps of WUDI-Merging")
    parser.add_argument("--methods", nargs="*", help="rivals: these alone")
    parser.add_argument("--peer", help="rivals: interpreter with fusion_bench")
    parser.add_argument(
        "--llama_layers", type=int, nargs="*", default=[1, 2, 4], help="out_of_core, together (the first): 28 is 3 B"
    )
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2], help="together: numbers of processes")
    parser.add_argument("--scratch", help="out_of_core, together: folder with room for six times the model")
    parser.add_argument(
        "--fold_options", nargs=argparse.REMAINDER, default=[], help="out_of_core, together: for `safemerge fold`"
    )
    parser.add_argument("--device", default="cuda", help="gpu: another device, to try the code")
    parser.add_argument("--tiny", action="store_true", help="gpu: sizes that tell nothing about speed")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results.json")
    arguments = parser.parse_args()
    content: dict[str, object] = {"threads": torch.get_num_threads(), "environment": environment()}
    for part in arguments.parts:
        rows = PARTS[part](arguments)
        print(f"\n{part}, {torch.get_num_threads()} threads\n\n{table(rows)}", flush=True)
        content[part] = rows
        write_json(arguments.output, content)


if __name__ == "__main__":
    main()
