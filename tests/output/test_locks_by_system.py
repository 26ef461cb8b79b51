"""Who may write an output, and who is told to wait."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from safemerge_pl.output import locks
from safemerge_pl.output.locks import BusyError, output_lock

_PARENT = """
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
    with subprocess.Popen([sys.executable, "-c", _PARENT, str(out)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(BusyError, match=f"process {holder.pid} on .* is writing the output"), output_lock(out):
            pass
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / ".out.lock").exists()
    with output_lock(out) as locked:
        assert locked
    assert list(tmp_path.iterdir()) == []
