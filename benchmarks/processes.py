"""One fold shared out among processes with one thread each, against the same fold in one process."""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.models import vit
from safemerge_pl.folding.processes import Processes
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import SafeMerge

__all__ = ["processes"]


def processes(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """A row a number of processes; seconds of the second fold of a stream, checks and hashes included."""
    rows: list[dict[str, object]] = []
    for count in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(  # type: ignore[no-untyped-call]
                _work, (count, folder, arguments.blocks, arguments.width), nprocs=count, start_method="spawn"
            )
            seconds, merged = Path(folder, "0").read_text().split()
        rows.append({"processes": count, "seconds": float(seconds), "merged": merged[:12]})
        rows[-1]["ratio"] = float(str(rows[0]["seconds"])) / float(seconds)
    return rows


def _work(rank: int, count: int, folder: str, blocks: int, width: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", count), rank=rank, world_size=count)
    base = vit(0, blocks=blocks, width=width)
    merger = ContinualMerger(base, SafeMerge())
    merger.processes = Processes(shared=True)
    merger.fold(vit(1, base, blocks=blocks, width=width), "one")
    expert = vit(2, base, blocks=blocks, width=width)
    dist.barrier()
    start = time.perf_counter()
    report = merger.fold(expert, "two")
    Path(folder, str(rank)).write_text(f"{time.perf_counter() - start} {report.merged}")
    dist.destroy_process_group()
