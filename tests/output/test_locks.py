"""Who may write an output, and who is told to wait."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from faults import FULL
from folders import beside
from tiny import folded, tower

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.commands.fold import fold_once
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.output import folders, locks
from safemerge_pl.output.locks import BusyError, output_lock

_HOLDER = """
import sys, time
from pathlib import Path
from safemerge_pl.output.locks import output_lock
with output_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


class FakeMsvcrt:
    """Windows' way to lock one byte of a file, on a system that has ``flock``."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        self.places: list[int] = []

    def locking(self, handle: int, mode: int, count: int) -> None:
        assert (mode, count) == (self.LK_NBLCK, 1)
        self.places.append(os.lseek(handle, 0, os.SEEK_CUR))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PermissionError(13, "Permission denied") from error


@pytest.fixture(params=["flock", "Windows"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Windows":
        monkeypatch.setattr(locks, "fcntl", None)
        monkeypatch.setattr(locks, "msvcrt", FakeMsvcrt())
    return str(request.param)


def refusal(folder: Path) -> str:
    """What another thread hears, which the system treats like another process."""
    heard: list[str] = []

    def other() -> None:
        try:
            with output_lock(folder) as locked:
                heard.append(f"it was let in: {locked}")
        except BusyError as error:
            heard.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    return heard[0]


def test_others_wait_and_learn_for_whom(system: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with output_lock(out) as locked, output_lock(out) as again:
        assert locked
        assert again
        assert f"process {os.getpid()} on " in refusal(out)
        assert refusal(tmp_path / "new" / "out2") == "it was let in: True"
    assert refusal(out) == "it was let in: True"
    assert list(tmp_path.iterdir()) == []  # neither the lock nor the folder that was made for it


def test_windows_locks_a_byte_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A locked byte cannot be read there, and the name of the holder stands at the beginning."""
    fake = FakeMsvcrt()
    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setattr(locks, "msvcrt", fake)
    with output_lock(tmp_path / "out"):
        assert (tmp_path / ".out.lock").read_text().startswith("process ")
    assert fake.places
    assert min(fake.places) > 1000


def test_a_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    with output_lock(tmp_path / "out") as locked:
        assert not locked
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(out)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(BusyError, match=f"process {holder.pid} on .* is writing the output"), output_lock(out):
            pass
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / ".out.lock").exists()
    with output_lock(out) as locked:
        assert locked
    assert list(tmp_path.iterdir()) == []


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
    strange = [".out.partial-9" + 30 * "9", ".out.partial-notes"]  # no process has such a number; nor left such a name
    for name in strange:
        (tmp_path / name).mkdir()
    assert ContinualMerger.load(folded(1).save(tmp_path / "out"), tower()).tasks == ["task1"]
    assert beside(tmp_path / "out") == sorted([f".out.partial-{os.getppid()}", strange[1]])


def test_whether_a_process_lives_is_asked_without_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows ``os.kill`` with any number but two ends the process."""

    def kill(*args: object) -> None:
        raise AssertionError("a signal was sent")

    asked: list[int] = []
    monkeypatch.setattr(folders.psutil, "pid_exists", lambda number: asked.append(number) or number == 4711)
    monkeypatch.setattr(folders.os, "kill", kill)
    found = [folders._alive(Path(f".out.partial-{number}")) for number in (4711, 4712, os.getpid())]
    assert (found, asked) == ([True, False, False], [4711, 4712])


def test_a_full_disk_does_not_keep_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a lock that cannot tell its holder."""

    real = os.write

    def full(handle: int, *data: object) -> int:
        if data and isinstance(data[0], memoryview):  # a tensor
            return real(handle, data[0])
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
