"""Two processes share a fold out: same bits as one, half the work each, and a failure of one is a failure of both."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.folding.processes import Processes
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, TSVM, MergeMethod, SafeMerge, Stack, StackResult, TiesMerging

METHODS: list[MergeMethod] = [tiny.fast_method(), TSVM(), OPCM(), TiesMerging()]


class Counting(SafeMerge):
    """Counts its layers; one of them fails in one process at the second task."""

    layers_done = 0
    breaks = False

    def fold_stack(self, stack: Stack) -> StackResult:
        type(self).layers_done += len(stack.layers)
        if self.breaks and stack.index == 2:
            raise ArithmeticError("no luck")
        return super().fold_stack(stack)


def fold_two(method: MergeMethod, *, shared: bool = False) -> ContinualMerger:
    base = tiny.tower(layers=4)
    merger = ContinualMerger(base, method)
    merger.processes = Processes(shared=shared)
    merger.fold(tiny.tuned(base, 1), "one")
    merger.fold(tiny.tuned(base, 2), "two")
    return merger


def report(merger: ContinualMerger) -> list[Any]:
    return [[entry.merged, entry.losses, [row.__dict__ for row in entry.layers]] for entry in merger.reports]


def work(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(rank + 1)  # the first process's number counts
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    found: dict[str, Any] = {"reports": [report(fold_two(method, shared=True)) for method in METHODS]}
    counting = Counting(scoring_rank=4, recovery_rank=3, task_rank=2, num_steps=3)
    fold_two(counting, shared=True)
    found["layers"] = Counting.layers_done
    counting.breaks = rank == 1
    try:
        fold_two(counting, shared=True)
    except (CheckpointError, RuntimeError) as error:
        found["error"] = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_share_a_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safemerge_pl.folding.engine.CORE_STACK_ENTRIES", 64)
    mp.start_processes(_small_stacks, (str(tmp_path),), nprocs=2, start_method="spawn")
    both = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    expected = json.loads(json.dumps([_alone(method) for method in METHODS]))
    for found in both:
        for mine, one in zip(found["reports"], expected, strict=True):
            assert mine == one
    assert [found["layers"] for found in both] == [20, 20]  # of 40: 20 layers, two tasks
    assert "no luck" in both[1]["error"]
    assert both[0]["error"].startswith("process 1 failed: CheckpointError: layers")


def _alone(method: MergeMethod) -> list[Any]:
    return report(fold_two(method))


def _small_stacks(rank: int, folder: str) -> None:
    """One layer a stack, so that there is something to share."""
    from safemerge_pl.folding import engine

    engine.CORE_STACK_ENTRIES = 64
    work(rank, folder)


def test_without_a_launcher_a_process_is_alone() -> None:
    processes = Processes(shared=True)
    assert (processes.count, processes.rank, processes.gather([1, 2])) == (1, 0, [[1, 2]])
    with pytest.raises(KeyError):
        processes.agree(lambda: {}["nothing"])
