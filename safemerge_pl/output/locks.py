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

# filelock 4.3 in the place of this: its file stays behind, its error does not say who has the lock, and a file system
# that has no locks is an error. All that is below would still be needed around its one call of flock.
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:  # everywhere else
    msvcrt = None  # type: ignore[assignment]

__all__ = ["BusyError", "output_lock"]

_held = threading.local()

_BEYOND = 2**30
"""Place of the byte that is locked on Windows, where nobody else could read it: behind the name of the holder."""


class BusyError(CheckpointError):
    """Another process is writing there."""


@contextmanager
def output_lock(folder: Path) -> Iterator[bool]:
    """Keep every other process from writing an output; the system gives the lock back if this one is killed.

    May be taken again by the thread that has it.

    Args:
        folder: the output, which need not exist; the lock is a file beside it for as long as it is held.

    Yields:
        Whether it is locked: ``False`` on a system or file system without locks, which is used all the same.

    Raises:
        BusyError: if another process (or thread) is writing there.
        CheckpointError: if the place cannot be written.
    """
    folder = folder.resolve()
    path = folder.with_name(f".{folder.name}.lock")
    held: dict[Path, bool] = _held.__dict__.setdefault("paths", {})
    if not (fcntl or msvcrt) or path in held or not folder.name:
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
        if fcntl is None:
            with contextlib.suppress(OSError):
                path.unlink()  # Windows removes no open file, and so never one that somebody else waits with
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()  # stays if something was written into it


def _lock(path: Path, folder: Path) -> tuple[int, bool]:
    """Open the file that tells who has the lock; its handle, and whether the system has locked it."""
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
        os.close(handle)  # the holder before us removed it: nobody else would see a lock on what is open here


def _try_lock(handle: int, folder: Path) -> bool:
    """Lock an open file, if there are locks where it lies; whether it is locked."""
    try:
        _lock_now(handle)
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


def _lock_now(handle: int) -> None:
    """Lock an open file without waiting.

    Raises:
        BlockingIOError: if somebody else has the lock.
        OSError: if there are no locks.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    os.lseek(handle, _BEYOND, os.SEEK_SET)
    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    except PermissionError as error:
        raise BlockingIOError(errno.EAGAIN, str(error)) from error
    finally:
        os.lseek(handle, 0, os.SEEK_SET)
