"""One SAFE-Merge fold against Algorithm 1 written out literally, layer by layer, with the same number of threads.

The literal form decomposes every matrix by a full SVD in float64 and rebuilds its projectors in every step, as the
algorithm is printed.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.models import decaying
from safemerge_pl.methods import SafeMerge, Stack
from safemerge_pl.runtime.cores import map_on_cores
from safemerge_pl.runtime.memory import PeakMemory

__all__ = ["literal", "make_stack", "products_per_second", "roofline"]


def make_stack(layers: int, d_out: int, d_in: int, device: str = "cpu") -> Stack:
    """A second task: pretrained, merged and incoming weights."""
    generator = torch.Generator().manual_seed(0)
    base = decaying(layers, d_out, d_in, generator=generator)
    parts = [base, *(base + decaying(layers, d_out, d_in, generator=generator, scale=0.01) for _ in range(2))]
    return Stack(tuple(f"vision.{index}.q" for index in range(layers)), 2, *(part.to(device) for part in parts))


def roofline(layers: int, d_out: int, d_in: int, method: SafeMerge) -> float:
    """Floating-point operations of the recovery's matrix products: the least that a fold has to do."""
    rank = min(method.recovery_rank, d_out, d_in)
    directions = min(method.scoring_rank, d_out, d_in) + min(method.task_rank, d_out, d_in)
    return 2.0 * layers * d_out * d_in * (3 * rank + 2 * directions) * method.num_steps


def literal(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Both forms on square matrices and on a third as many that are four times as tall."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from reference import Settings, reference_fold  # the literal twin lives with the tests

    width, layers = arguments.width, arguments.layers
    ranks = {"scoring_rank": max(1, width // 6), "recovery_rank": max(1, width // 12), "task_rank": max(1, width // 96)}
    method = SafeMerge(**ranks)
    method.fold_stack(make_stack(1, width, width))  # libraries load and threads start outside the clock
    speed = products_per_second(width)
    rows: list[dict[str, object]] = []
    for d_out, count in ((width, layers), (4 * width, max(1, layers // 3))):
        stack = make_stack(count, d_out, width)
        alone = [Stack((name,), 2, *(part[i : i + 1] for part in (stack.pretrained, stack.merged, stack.incoming)))
                 for i, name in enumerate(stack.layers)]  # fmt: skip
        with PeakMemory() as peak:
            start = time.perf_counter()
            list(map_on_cores(method.fold_stack, alone))  # as the merger does it on a CPU
            ours = time.perf_counter() - start
        start = time.perf_counter()
        for index, layer in enumerate(stack.layers):
            parts = (part[index] for part in (stack.pretrained, stack.merged, stack.incoming))
            reference_fold(*parts, layer=layer, index=2, settings=Settings(**ranks))
        theirs = time.perf_counter() - start
        least = roofline(count, d_out, width, method) / speed
        rows.append(
            {
                "shape": f"{count} x {d_out} x {width}",
                "ours_s": ours,
                "literal_s": theirs,
                "ratio": theirs / ours,
                "products_alone_s": least,
                "peak_mib": peak.mib,
            }
        )
    return rows


def products_per_second(width: int) -> float:
    """Floating-point operations a second of square products, on as many threads as a fold may use."""
    a = torch.randn(width, width)
    threads = torch.get_num_threads()
    start = time.perf_counter()
    list(map_on_cores(lambda _: [a @ a for _ in range(20)], range(threads)))
    return threads * 20 * 2.0 * width**3 / (time.perf_counter() - start)
