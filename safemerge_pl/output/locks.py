"""One process at a time writes an output; a lock that nobody has to clean up after a kill."""

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safemerge_pl.checkpoints.open import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["BusyError", "output_lock"]

_held = threading.local()


class BusyError(CheckpointError):
    """Another process is writing there."""


@contextmanager
def output_lock(folder: Path) -> Iterator[bool]:
    """Keep every other process from writing an output; the system gives the lock back if this one is killed.

    May be taken again by the thread that has it. Gives ``False`` on a system or file system without locks, which is
    used without.

    Raises:
        BusyError: if another process (or thread) is writing there.
        CheckpointError: if the place cannot be written.
    """
    folder = folder.resolve()
    path = folder.with_name(f".{folder.name}.lock")
    held: dict[Path, bool] = _held.__dict__.setdefault("paths", {})
    if fcntl is None or path in held or not folder.name:
        yield held.get(path, False)
        return
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        handle, locked = _lock(path, folder)
    except OSError as error:
        raise CheckpointError(f"the output {folder} cannot be written ({error}); name another folder.") from error
    held[path] = locked
    try:
        yield locked
    finally:
        del held[path]
        with contextlib.suppress(OSError):
            path.unlink()  # while it is still locked: whoever opened it meanwhile sees that it is gone
        os.close(handle)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()  # stays if something was written into it


def _lock(path: Path, folder: Path) -> tuple[int, bool]:
    """An open file that tells who has it, and whether the system has locked it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = _try_lock(handle, folder)
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                with contextlib.suppress(OSError):  # a full disk: the lock holds without its name
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle, locked
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the holder before us took it away: what is locked now is nobody's


def _try_lock(handle: int, folder: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
        raise BusyError(
            f"{holder} is writing the output {folder}; wait for it to end, or name another folder."
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return False
    return True
