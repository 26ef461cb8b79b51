"""One process at a time writes an output."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import FULL
from folders import beside
from tiny import folded, tower

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.commands.fold import fold_once
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.output import locks
from safemerge_pl.output.locks import output_lock


def attempt(work: Callable[[], object]) -> str | None:
    """What it raised, in words."""
    try:
        work()
    except (CheckpointError, KeyboardInterrupt) as raised:
        return str(raised)
    return None


def test_an_output_in_use_is_refused(tmp_path: Path) -> None:
    """By another thread here, which the system treats like another process; the holder is named."""
    out = folded(1).save(tmp_path / "out")
    caught: list[str] = []

    def other() -> None:
        for attempt in (lambda: folded(1, 2).save(out), lambda: fold_once("gone", "gone", str(out))):
            with pytest.raises(CheckpointError) as raised:
                attempt()
            caught.append(str(raised.value))

    with output_lock(out), output_lock(out):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert ContinualMerger.load(out, tower()).tasks == ["task1"]
    assert all(f"process {os.getpid()} on " in text and "is writing the output" in text for text in caught)
    assert len(caught) == 2
    assert beside(out) == []
    folded(1, 2).save(out)


def test_the_lock_of_a_dead_process_does_not_last(tmp_path: Path) -> None:
    """Its file may lie there, but the system has given the lock back."""
    out = folded(1).save(tmp_path / "out")
    (tmp_path / ".out.lock").write_text("process 1 on elsewhere")
    folded(1, 2).save(out)
    assert beside(out) == []


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then only what a dead process left is swept away."""

    def missing(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", missing)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for number in (dead.pid, os.getppid(), os.getpid()):
        (tmp_path / f".out.partial-{number}").mkdir()
    assert ContinualMerger.load(folded(1).save(tmp_path / "out"), tower()).tasks == ["task1"]
    assert beside(tmp_path / "out") == [f".out.partial-{os.getppid()}"]


def test_a_full_disk_does_not_keep_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a lock that cannot tell its holder."""

    def full(*args: object) -> None:
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        folded(1).save(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", full)
        with pytest.raises(CheckpointError, match="No space left"):
            folded(1, 2).save(tmp_path / "out")
    folded(1, 2).save(tmp_path / "out")
    assert beside(tmp_path / "out") == []
