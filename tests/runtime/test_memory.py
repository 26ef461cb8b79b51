"""Memory that a piece of work takes."""

import mmap
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from safemerge_pl.runtime.memory import PeakMemory, peak_memory_mib


def test_the_peak_of_this_process_is_plausible() -> None:
    assert 50 < peak_memory_mib() < 100_000


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system gives the peak of the process itself")
def test_the_peak_is_not_that_of_the_parent() -> None:
    """On Linux getrusage gives a child that was started with exec the peak of its parent."""
    parent = """
import subprocess, sys
block = bytearray(b"x" * 2**29)  # and as much for the string
del block
code = "from safemerge_pl.runtime.memory import peak_memory_mib; print(peak_memory_mib())"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, close_fds=False).stdout)
"""
    run = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 20 < int(run.stdout) < 900


def test_peak_memory_sees_what_is_allocated() -> None:
    """Also where it is memory that was freed before and is still resident."""

    def blocks() -> list[bytearray]:
        return [bytearray(b"x" * 2**16) for _ in range(80 * 2**4)]

    freed, kept = blocks(), bytearray(b"x" * 2**16)  # the latter behind, so that what is freed is not at the end
    del freed
    with PeakMemory() as peak:
        again = blocks()
    del again, kept
    assert peak.mib is None or 70 < peak.mib < 200


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the pages of files by themselves")
def test_pages_of_files_are_not_counted(tmp_path: Path) -> None:
    """A checkpoint is mapped into memory, and the system takes its pages back as it likes."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * 2**18)  # 64 MiB
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with PeakMemory() as peak:
            before = psutil.Process().memory_info().rss  # only here, as the heap has just been trimmed
            assert sum(mapped[place] for place in range(0, len(mapped), mmap.PAGESIZE)) == 0
            time.sleep(0.02)
        assert psutil.Process().memory_info().rss - before > 60 * 2**20
    assert peak.mib is not None
    assert peak.mib < 10


def test_an_unknown_size_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_info", refuse)
    with PeakMemory() as peak:
        pass
    assert peak.mib is None
