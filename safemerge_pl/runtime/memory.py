"""How much memory a piece of work takes."""

import ctypes
import gc
import re
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil
import torch

__all__ = ["PeakMemory", "peak_memory_mib"]

_MIB = 2**20

_INTERVAL = 0.003
"""Seconds between two samples of the resident size; one takes about 0.03 ms."""


def peak_memory_mib() -> int:
    """Largest resident size of this process so far, MiB; 0 where the system does not say.

    Example:
        >>> peak_memory_mib() > 0
        True
    """
    # psutil knows the peak on Windows only. On Linux getrusage would do, but may give the peak of the parent process.
    with suppress(OSError):
        match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if match:
            return int(match[1]) // 1024
    with suppress(psutil.Error, OSError):
        peak = getattr(psutil.Process().memory_info(), "peak_wset", None)
        if peak is not None:
            return int(peak) // _MIB
    with suppress(ImportError):
        import resource  # not on Windows

        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (_MIB if sys.platform == "darwin" else 1024))
    return 0


class PeakMemory:
    """Memory that the work inside takes at its peak, on top of what was there before.

    On a CUDA device it is what torch allocates there. On the CPU the resident size is sampled every few milliseconds.

    Args:
        device: where the work runs.

    Attributes:
        mib: the peak in MiB, once the work is done; ``None`` where the system does not tell.

    Example:
        >>> with PeakMemory() as peak:
        ...     block = torch.ones(2**24)  # 64 MiB
        >>> peak.mib is None or peak.mib > 30
        True
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.mib: float | None = None
        self._device = device if device is not None and device.type == "cuda" else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._start = self._highest = 0

    def __enter__(self) -> "PeakMemory":
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        else:
            gc.collect()  # memory that is freed during the work would hide as much of what the work takes
            _trim_heap()
            self._start = self._highest = _resident()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device is not None:
            self.mib = (torch.cuda.max_memory_allocated(self._device) - self._start) / _MIB
            return
        self._highest = max(self._highest, _resident())
        self._stop.set()
        self._thread.join()
        self.mib = (self._highest - self._start) / _MIB if self._start else None

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self._highest = max(self._highest, _resident())


def _trim_heap() -> None:
    """Return freed memory to the system where glibc allows: work that takes it again would show no growth."""
    with suppress(AttributeError, OSError, TypeError):  # musl, none, Windows
        ctypes.CDLL(None).malloc_trim(0)


def _resident() -> int:
    """Resident bytes now, 0 where the system does not tell.

    Pages of files are left out where they are counted by themselves (Linux): the system takes them back as it likes.
    What psutil calls ``uss`` leaves them out everywhere, but takes 50 ms.
    """
    try:
        info = psutil.Process().memory_info()
    except (psutil.Error, OSError):
        return 0
    return int(info.rss - getattr(info, "shared", 0))
