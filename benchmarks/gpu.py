"""Eight tasks of ViT-B/32 and ViT-L/14 shapes on a GPU: seconds of the arithmetic alone, and peak memory."""

import argparse
import time

import torch

from benchmarks.literal import make_stack
from safemerge_pl.methods import SafeMerge

__all__ = ["gpu"]

_SHAPES = {
    "ViT-B/32": [(48, 768, 768), (12, 3072, 768)],
    "ViT-L/14": [(96, 1024, 1024), (24, 4096, 1024)],
}


def gpu(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """A row a model; the first fold, which warms everything up, is not counted."""
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    rows: list[dict[str, object]] = []
    torch.set_float32_matmul_precision("highest")
    for model, shapes in _SHAPES.items():
        stacks = [make_stack(*shape, device="cuda") for shape in shapes]
        method = SafeMerge()
        with torch.inference_mode():
            for stack in stacks:
                method.fold_stack(stack)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held, start = torch.cuda.memory_allocated(), time.perf_counter()
            solving = sum(method.fold_stack(stack).solve_seconds for _ in range(8) for stack in stacks)
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        peak = (torch.cuda.max_memory_allocated() - held) / 2**30
        rows.append(
            {
                "card": torch.cuda.get_device_name(),
                "model": model,
                "seconds_8_tasks": seconds,
                "solver_s": solving,  # the rest is decompositions and scores
                "peak_gib": peak,
            }
        )
    return rows
