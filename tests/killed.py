"""Fold a stream into one output in processes that are killed: the script behind ``test_faults``.

    python killed.py {every event,soak,race} FOLDER

FOLDER holds ``base`` and ``task1`` to ``task4``. Prints counts as JSON; fails on an output that is not yesterday's or
today's.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from safemerge_pl import cli
from safemerge_pl.merger import ContinualMerger

ROOT = Path(sys.argv[2])
OUT, STREAM = ROOT / "day" / "out", ["task1", "task2", "task3", "task4"]
BUDGET = 15.0


def fold(task: str, *, first: bool) -> None:
    """What the user types."""
    method = ["--method", "SafeMerge", "--method.num_steps", "3", "--method.scoring_rank", "4"] if first else []
    merged = [] if first else ["--merged", str(OUT)]
    places = ["--pretrained", str(ROOT / "base"), "--incoming", str(ROOT / task), "--output", str(OUT)]
    cli.main(["fold", *places, *method, *merged])


def child(work: Callable[[], None]) -> int:
    """Run in a process of its own; its number."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        errors = os.open(ROOT / f"stderr-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 2)
        work()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0) if isinstance(stop.code, int) or stop.code is None else 1
    finally:
        sys.stderr.flush()
        os._exit(code)


def tasks(expected: dict[int, str]) -> list[str]:
    """The tasks in the output, which must be whole and have the bits of an undisturbed run."""
    if not OUT.exists() and not list(OUT.parent.glob(".out.old-*")):
        return []
    raw = OUT.exists()
    if raw:
        weights = load_file(OUT / "model.safetensors")
    merger = ContinualMerger.load(OUT, ROOT / "base")
    assert merger.tasks == STREAM[: len(merger.tasks)], merger.tasks
    assert merger.fingerprint() == expected[len(merger.tasks)]
    assert len((OUT / "merge_ledger.jsonl").read_text().splitlines()) == len(merger.tasks)
    if raw:
        for name, tensor in merger.merged.items():
            assert torch.equal(weights[name], tensor.to(weights[name].dtype)), name
    return merger.tasks


def undisturbed() -> dict[int, str]:
    hashes = {}
    for number, task in enumerate(STREAM, 1):
        fold(task, first=number == 1)  # in this process: the ones that are killed then need not import anything
        hashes[number] = ContinualMerger.load(OUT, ROOT / "base").fingerprint()
        shutil.copytree(OUT, ROOT / f"day{number}")
    assert [path.name for path in OUT.parent.iterdir()] == ["out"]
    shutil.rmtree(OUT.parent)
    return hashes


def stream() -> None:
    """All that is left of the stream."""
    done = json.loads((OUT / "merge_state.json").read_text())["tasks"] if OUT.exists() else []
    if not OUT.exists() and list(OUT.parent.glob(".out.old-*")):
        done = ContinualMerger.load(OUT, ROOT / "base").tasks
    for task in STREAM[len(done) :]:
        fold(task, first=task == STREAM[0])


def soak(expected: dict[int, str]) -> dict[str, int]:
    """Kill at random moments until the time is over; every stream must end with the undisturbed run's hash."""
    chance, end, killed, finished = random.Random(0), time.monotonic() + BUDGET, 0, 0
    start = time.monotonic()
    process = child(stream)
    os.waitpid(process, 0)
    whole = time.monotonic() - start
    while time.monotonic() < end:
        if tasks(expected) == STREAM:
            assert all(path.name == "out" or path.name.startswith(".out.") for path in OUT.parent.iterdir())
            shutil.rmtree(OUT.parent)
            finished += 1
        process = child(stream)
        time.sleep(chance.uniform(0, 0.6 * whole))
        os.kill(process, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(process, 0)[1])
        tasks(expected)
    os.waitpid(child(stream), 0)
    assert tasks(expected) == STREAM
    return {"killed": killed, "finished": finished}


def every_event(expected: dict[int, str]) -> dict[str, int]:
    """From yesterday's output, kill before the n-th file operation there, for every n; then go on."""
    seen = {1: 0, 2: 0}
    number = 0
    while True:
        shutil.rmtree(OUT.parent, ignore_errors=True)
        OUT.parent.mkdir()
        shutil.copytree(ROOT / "day1", OUT)

        def doomed(last: int = number) -> None:
            events = 0

            def watch(event: str, args: tuple[object, ...]) -> None:
                nonlocal events
                if event.startswith(("open", "os.", "shutil.")) and str(OUT.parent) in str(args[:2]):
                    if events == last:
                        os.kill(os.getpid(), signal.SIGKILL)
                    events += 1

            sys.addaudithook(watch)
            fold("task2", first=False)

        process = child(doomed)
        status = os.waitpid(process, 0)[1]
        found = tasks(expected)
        if not os.WIFSIGNALED(status):
            assert status == 0, (ROOT / f"stderr-{process}").read_text()
            return {"killed": number, "yesterday": seen[1], "today": seen[2]}
        seen[len(found)] += 1
        if len(found) == 1 and number % 3 == 0:
            assert os.waitpid(child(lambda: fold("task2", first=False)), 0)[1] == 0
            assert len(tasks(expected)) == 2
            assert [path.name for path in OUT.parent.iterdir()] == ["out"]
        number += 1


def race(expected: dict[int, str]) -> dict[str, int]:
    """Two processes continue one merge at the same time: one at a time gets through, the other is told why."""
    refused = won = 0
    for _ in range(6):
        shutil.rmtree(OUT.parent, ignore_errors=True)
        OUT.parent.mkdir()
        shutil.copytree(ROOT / "day1", OUT)
        both = [child(lambda task=task: fold(task, first=False)) for task in ("task2", "task3")]  # type: ignore[misc]
        codes = [os.WEXITSTATUS(os.waitpid(process, 0)[1]) for process in both]
        state = ContinualMerger.load(OUT, ROOT / "base")
        assert len(state.tasks) == 1 + codes.count(0), (state.tasks, codes)
        for process, code in zip(both, codes, strict=True):
            if code:
                assert "is writing the output" in (ROOT / f"stderr-{process}").read_text()
        assert [path.name for path in OUT.parent.iterdir()] == ["out"]
        refused, won = refused + 2 - codes.count(0), won + codes.count(0)
    assert expected
    return {"refused": refused, "won": won}


if __name__ == "__main__":
    torch.set_num_threads(1)
    modes = {"every event": every_event, "soak": soak, "race": race}
    print(json.dumps(modes[sys.argv[1]](undisturbed())))
