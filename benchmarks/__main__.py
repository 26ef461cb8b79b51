"""``python -m benchmarks``: one SAFE-Merge fold against Algorithm 1 written out literally, layer by layer.

Both run on the same random matrices with the same number of threads. The literal form decomposes every matrix by a full
SVD in float64 and rebuilds its projectors in every step, as the algorithm is printed. Figures are seconds on this
machine and their ratio; only the ratio means anything elsewhere.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from safemerge_pl.memory import PeakMemory
from safemerge_pl.methods import SafeMerge, Stack
from safemerge_pl.report import environment, write_json

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from reference import Settings, reference_fold  # the literal twin lives with the tests


def make_stack(layers: int, d_out: int, d_in: int, seed: int = 0) -> Stack:
    """A second task: pretrained, merged and incoming weights with decaying spectra."""
    generator = torch.Generator().manual_seed(seed)

    def decaying(scale: float) -> torch.Tensor:
        noise = torch.randn(layers, d_out, d_in, generator=generator)
        return scale * noise * torch.linspace(1, 0.05, d_in).square()

    base = decaying(1.0)
    names = tuple(f"vision.{index}.q" for index in range(layers))
    return Stack(names, 2, base, base + decaying(0.01), base + decaying(0.01))


def main() -> None:
    """Measure, print a table, write ``benchmarks/results.json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--width", type=int, default=256, help="d_in; 768 is ViT-B/32 (the literal form takes minutes)")
    parser.add_argument("--layers", type=int, default=6, help="square matrices; a third as many are four times as tall")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results.json")
    arguments = parser.parse_args()
    width, layers = arguments.width, arguments.layers
    ranks = {"scoring_rank": max(1, width // 6), "recovery_rank": max(1, width // 12), "task_rank": max(1, width // 96)}
    method = SafeMerge(**ranks)
    rows = []
    method.fold_stack(make_stack(1, width, width))  # libraries load and threads start outside the clock
    for d_out, count in ((width, layers), (4 * width, max(1, layers // 3))):
        stack = make_stack(count, d_out, width)
        with PeakMemory() as peak:
            start = time.perf_counter()
            method.fold_stack(stack)
            ours = time.perf_counter() - start
        start = time.perf_counter()
        for index, layer in enumerate(stack.layers):
            parts = (part[index] for part in (stack.pretrained, stack.merged, stack.incoming))
            reference_fold(*parts, layer=layer, index=2, settings=Settings(**ranks))
        literal = time.perf_counter() - start
        rows.append({"shape": [count, d_out, width], "ours_s": ours, "literal_s": literal, "ratio": literal / ours})
        memory = "-" if peak.mib is None else f"{peak.mib:.0f} MiB"
        print(f"{count:>3} x {d_out} x {width}   ours {ours:7.2f} s   literal {literal:7.2f} s   "
              f"{literal / ours:5.1f} times faster   peak {memory}")  # fmt: skip
    total = sum(row["literal_s"] for row in rows) / sum(row["ours_s"] for row in rows)
    print(f"all {total:.1f} times faster with {torch.get_num_threads()} threads")
    write_json(arguments.output, {"rows": rows, "threads": torch.get_num_threads(), "environment": environment()})


if __name__ == "__main__":
    main()
