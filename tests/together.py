"""Fold in several processes, undisturbed and disturbed: the script behind ``commands/test_fold_together``.

    python together.py FOLDER

FOLDER holds ``base``, ``task1`` and ``task2``. The processes are forked, so that none has to import anything; each has
the environment that torchrun gives it. Prints what happened as JSON.
"""

import copy
import errno
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
import torch.distributed as dist
from tiny import watch_files

from safemerge_pl import cli
from safemerge_pl.commands import fold as fold_command
from safemerge_pl.commands.fold import fold_once
from safemerge_pl.folding import engine
from safemerge_pl.folding.launch import join_processes
from safemerge_pl.folding.processes import Processes
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import (
    NUFILT,
    OPCM,
    TSVM,
    IsoC,
    KnOTSTies,
    MergeMethod,
    NaiveAccumulation,
    SafeShare,
    Stack,
    StackResult,
    TaskArithmetic,
    TiesMerging,
    WUDIMerging,
)
from safemerge_pl.output import shared_files

ROOT = Path(sys.argv[1])
BASE, TASKS = str(ROOT / "base"), [str(ROOT / "task1"), str(ROOT / "task2")]
DAY = ROOT / "day"
STORE: Any = None
engine.CORE_STACK_ENTRIES = 64  # one layer a stack, so that there is something to share


class OneByOne(tiny.Add):
    """Counts its stacks, so that one process has to see all of them; the count is a part of the result."""

    def fold_stack(self, stack: Stack) -> StackResult:
        self.seen = getattr(self, "seen", 0) + 1
        return StackResult(stack.merged + stack.task_vector / self.seen)


METHODS: dict[str, tuple[MergeMethod, dict[str, Any]]] = {
    "safe_merge": (tiny.fast_method(), {"low_memory": True}),
    "safe_share": (SafeShare(0.5, 2, 3), {"dtype": "bfloat16"}),
    "naive": (NaiveAccumulation(), {}),
    "task_arithmetic": (TaskArithmetic(), {"max_response": 0.003, "max_shard_size": 900}),
    "ties": (TiesMerging(), {"low_memory": True}),
    "wudi": (WUDIMerging(num_steps=3), {}),
    "iso_c": (IsoC(), {}),
    "knots": (KnOTSTies(), {}),
    "tsv_m": (TSVM(), {"low_memory": True, "max_response": 0.003, "max_shard_size": 700}),
    "opcm": (OPCM(), {"low_memory": True}),
    "nufilt": (NUFILT(null_rank=3, recovery_rank=3, task_rank=2, num_steps=3), {}),
    "one_by_one": (OneByOne(), {}),
}


def start(count: int, work: Callable[[int], None]) -> list[int]:
    """Run something in so many processes; their numbers."""
    sys.stdout.flush()
    global STORE
    processes: list[int] = []
    # torchrun's agent keeps the store, so that it outlives the first process
    STORE = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(STORE.port)}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for rank in range(count):
        process = os.fork()
        if process:
            processes.append(process)
            continue
        code = 1
        try:
            for stream, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(ROOT / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            os.environ |= given | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            work(rank)
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return processes


def end(processes: list[int], seconds: float = 90.0) -> list[int]:
    """Exit codes, negative for signals."""
    codes, last = [], time.monotonic() + seconds
    for process in processes:
        while not (found := os.waitpid(process, os.WNOHANG))[0] and time.monotonic() < last:
            time.sleep(0.005)
        if found[0]:
            codes.append(os.waitstatus_to_exitcode(found[1]))
        else:
            for each in processes[len(codes) :]:
                os.kill(each, signal.SIGKILL)
            raise TimeoutError(f"a process hangs: {codes}, {words(len(processes))}")
    return codes


def words(count: int, stream: str = "err") -> list[str]:
    """What each process said."""
    return [(ROOT / f"{stream}-{rank}").read_text() for rank in range(count)]


def content(folder: Path) -> dict[str, str]:
    """Every file of an output, with what is the same in every run."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.name in ("README.md", "merge_ledger.jsonl"):
            found[path.name] = str(len(path.read_text().splitlines()))
        elif path.name == "merge_state.json":
            state = json.loads(path.read_text())
            for report in state["reports"]:
                for changing in ("seconds", "solve_seconds", "time"):
                    del report[changing]
            found[path.name] = json.dumps(state)
        else:
            found[path.name] = path.read_bytes().hex()
    return found


def every_method(folder: Path) -> None:
    """Two tasks in one go with each method; the first method also on another day."""
    with join_processes() as processes:
        for name, (method, options) in METHODS.items():
            fold_once(BASE, TASKS, str(folder / name), method=copy.deepcopy(method), processes=processes, **options)
        days = str(folder / "days")
        fold_once(BASE, TASKS[0], days, method=OPCM(), low_memory=True, max_response=0.003, processes=processes)
        merger = fold_once(BASE, TASKS[1], days, merged=days, low_memory=False, processes=processes)
        assert len(merger.merged) == len(merger.pretrained)  # now that all is in the output


def reading(rank: int) -> None:
    """Fold, and write down which tensors of which model are read."""
    read: list[tuple[str, str]] = []
    at: list[str] = []
    watch_files(
        pytest.MonkeyPatch(), lambda path: at.append(path.parent.name), lambda name: read.append((at[-1], name))
    )
    with join_processes() as processes:
        fold_once(BASE, TASKS, str(ROOT / "read"), method=tiny.fast_method(), processes=processes)
    (ROOT / f"read-{rank}.json").write_text(json.dumps(sorted(set(read))))


def fold(*options: str, task: str = "task2") -> None:
    """What the user types on the second day."""
    out, incoming = str(DAY / "out"), str(ROOT / task)
    cli.main(["fold", "--pretrained", BASE, "--incoming", incoming, "--merged", out, "--output", out, *options])


def tomorrow() -> None:
    shutil.rmtree(DAY, ignore_errors=True)
    DAY.mkdir()
    shutil.copytree(ROOT / "yesterday", DAY / "out")


def state() -> str:
    """Whether the output is that of yesterday, or of today with the bits of an undisturbed run."""
    merger = ContinualMerger.load(DAY / "out", BASE)
    days = [(ROOT / day / "merge_master.safetensors").read_bytes() for day in ("yesterday", "today")]
    assert (DAY / "out" / "merge_master.safetensors").read_bytes() == days[len(merger.tasks) - 1]
    return ("yesterday", "today")[len(merger.tasks) - 1]


def disturbed(work: Callable[[int], None], count: int = 2) -> dict[str, Any]:
    """What becomes of a fold, of the output and of what lies beside it."""
    tomorrow()
    codes = end(start(count, work))
    beside = sorted(path.name for path in DAY.iterdir() if path.name != "out")
    return {"codes": codes, "said": words(count), "output": state(), "beside": beside}


def full_disk(rank: int) -> None:
    """The third write of tensors fails on the second process."""
    real, calls = os.write, 0

    def write(handle: int, data: Any) -> int:
        nonlocal calls
        calls += isinstance(data, memoryview)
        if calls == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    with mock.patch.object(os, "write", write if rank == 1 else real):
        fold()


def unseen(rank: int, name: str) -> None:
    """A file of this name is not there on the second process, and no tensor may be read."""
    real = Path.exists
    tiny.refuse_to_read(pytest.MonkeyPatch())
    shared_files._PATIENCE = 0.3
    with mock.patch.object(Path, "exists", lambda path: name not in path.name and real(path) if rank else real(path)):
        fold()


def interrupted(rank: int) -> None:
    """Both get the signal of Ctrl-C in the middle of their work."""
    signalled(signal.SIGINT)


def leaving(rank: int) -> None:
    """The first process is told to stop, as torchrun tells it."""
    signalled(signal.SIGTERM, rank == 0)


def signalled(number: int, here: bool = True) -> None:
    real = engine.Folding._fold_own

    def stop(folding: Any, staged: Any) -> Any:
        if here:
            os.kill(os.getpid(), number)
        return real(folding, staged)

    with mock.patch.object(engine.Folding, "_fold_own", stop):
        fold()


def watched(rank: int, last: int | None = None) -> None:
    """Fold and count what is done with files and between processes; SIGKILL at the ``last`` of these."""
    events = 0

    def watch(event: str = "", args: tuple[object, ...] = ()) -> None:
        nonlocal events
        if event.startswith(("open", "os.", "shutil.", "gather")):
            events += 1
            if events == last:
                os.kill(os.getpid(), signal.SIGKILL)

    real = Processes.gather

    def gather(processes: Processes, value: Any) -> Any:
        watch("gather")
        return real(processes, value)

    parse = fold_command._parse

    def begin(processes: Processes) -> dict[str, Any]:  # one that dies earlier is torchrun's business
        sys.addaudithook(watch)
        return parse(processes)

    with mock.patch.object(Processes, "gather", gather), mock.patch.object(fold_command, "_parse", begin):
        fold()
    (ROOT / f"events-{rank}").write_text(str(events))


def kills(times: int) -> dict[str, Any]:
    """Kill one of two or three processes at random points of a fold, and start it again."""
    chance = random.Random(0)
    found: dict[str, Any] = {"killed": 0, "yesterday": 0, "today": 0, "codes": [], "said": []}
    tomorrow()
    assert end(start(2, watched)) == [0, 0], words(2)
    assert state() == "today"
    for _ in range(times):
        tomorrow()
        count = chance.choice([2, 2, 3])
        victim = chance.randrange(2)
        point = 1 + chance.randrange(int((ROOT / f"events-{victim}").read_text()))
        codes = end(start(count, lambda rank, v=victim, p=point: watched(rank, p if rank == v else None)))  # type: ignore[misc]
        found["killed"] += codes[victim] == -signal.SIGKILL
        found["codes"].append(codes)
        found["said"].append(words(count))
        after = state()
        found[after] += 1
        if after == "yesterday" and found["yesterday"] < 2:
            assert end(start(2, lambda rank: fold())) == [0, 0], words(2)
            assert state() == "today"
            assert [path.name for path in DAY.iterdir()] == ["out"]
    return found


def main() -> dict[str, Any]:
    clock = time.monotonic()
    every_method(ROOT / "1")
    found: dict[str, Any] = {"times": {"1": time.monotonic() - clock}}
    for count in (2, 3):
        begin = time.monotonic()
        codes = end(start(count, lambda rank, count=count: every_method(ROOT / str(count))))  # type: ignore[misc]
        assert codes == [0] * count, words(count)
        found["times"][count] = time.monotonic() - begin
    found["content"] = {count: {name: content(ROOT / count / name) for name in (*METHODS, "days")} for count in "123"}
    assert end(start(3, reading)) == [0] * 3, words(3)
    fold_once(BASE, TASKS[0], str(ROOT / "yesterday"), method=tiny.fast_method(), low_memory=True)
    shutil.copytree(ROOT / "yesterday", ROOT / "today")
    fold_once(BASE, TASKS[1], str(ROOT / "today"), merged=str(ROOT / "today"))
    found["undisturbed"] = disturbed(lambda rank: fold("--low_memory", "true"), 3)
    found["printed"] = words(3, "out")
    found["full disk"] = disturbed(full_disk)
    found["interrupt"] = disturbed(interrupted)
    found["terminated"] = disturbed(leaving)
    found["no shared files"] = disturbed(lambda rank: unseen(rank, ".token-"))
    found["no task"] = disturbed(lambda rank: unseen(rank, "task2"))
    found["wrong option"] = disturbed(lambda rank: fold("--max_shard_size", "0"))
    found["no option"] = disturbed(lambda rank: fold("--outputs", "x"))
    found["not finite"] = disturbed(lambda rank: fold(task="broken"))
    found["times"]["disturbed"] = time.monotonic() - clock
    found["kills"] = kills(4)
    found["times"]["all"] = time.monotonic() - clock
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main()))
