"""How a fold grows with layers, width, tasks and ranks; each figure beside what its products alone would take."""

import argparse
import time

from benchmarks.literal import products_per_second, roofline
from benchmarks.models import vit
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import SafeMerge
from safemerge_pl.runtime.memory import PeakMemory

__all__ = ["scaling"]

_START = {"blocks": 2, "width": 256, "task": 2, "scoring_rank": 43, "recovery_rank": 21, "task_rank": 3}
_VARIED = {
    "blocks": [1, 2, 4, 8],
    "width": [128, 256, 512],
    "task": [1, 2, 4],
    "scoring_rank": [21, 43, 85],
    "recovery_rank": [11, 21, 43],
    "task_rank": [1, 3, 12],
}


def scaling(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Seconds of the last fold of a stream; one thing is varied at a time."""
    rows: list[dict[str, object]] = []
    for varied, values in _VARIED.items():
        for value in values:
            at = {**_START, varied: value}
            blocks, width = at["blocks"], at["width"]
            method = SafeMerge(**{key: at[key] for key in ("scoring_rank", "recovery_rank", "task_rank")})
            base = vit(0, blocks=blocks, width=width)
            merger = ContinualMerger(base, method)
            seconds = 0.0
            with PeakMemory() as peak:
                for task in range(1, at["task"] + 1):
                    expert = vit(task, base, blocks=blocks, width=width)
                    start = time.perf_counter()
                    merger.fold(expert, f"task{task}")
                    seconds = time.perf_counter() - start
            flops = roofline(4 * blocks, width, width, method) + roofline(blocks, 4 * width, width, method)
            least = flops / products_per_second(width)
            rows.append(
                {"varied": varied, "value": value, "seconds": seconds, "products_alone_s": least, "peak_mib": peak.mib}
            )
    return rows
