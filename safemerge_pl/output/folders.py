"""Output folders that are written whole or not at all, by one process at a time, and that survive a kill."""

import contextlib
import ctypes
import errno
import glob
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from safemerge_pl.checkpoints.open import CheckpointError
from safemerge_pl.folding.processes import Processes
from safemerge_pl.output.files import STATE_FILE, is_weights
from safemerge_pl.output.locks import BusyError, output_lock
from safemerge_pl.output.state import read_state

__all__ = ["check_output", "nearest", "recover_output", "require_space", "staged_folder", "staged_together"]


def check_output(folder: Path, inputs: tuple[Path, ...] = ()) -> None:
    """Refuse an output folder that cannot or must not be written, before any work is done.

    A folder that is missing, empty, or holds an earlier merge (``merge_state.json``) may be written.

    Raises:
        CheckpointError: if the folder holds something else, is or lies in an input, or cannot be written.
    """
    recover_output(folder)
    resolved = folder.resolve()
    if resolved == Path.cwd() or resolved in Path.cwd().parents:
        raise CheckpointError(f"the output {folder} is or holds the current folder; name another folder.")
    for source in (path.resolve() for path in inputs):
        if resolved == source or source in resolved.parents:
            raise CheckpointError(f"the output {folder} is or lies inside the input {source}; name another folder.")
        if resolved in source.parents:
            raise CheckpointError(f"the output {folder} holds the input {source}; name another folder.")
    if folder.is_symlink() and not folder.exists():
        raise CheckpointError(f"the output {folder} is a link to a place that is gone; name another folder.")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"the output {folder} is a file; name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / STATE_FILE).exists():
        raise CheckpointError(f"the output {folder} is not empty and holds no earlier merge; name a new folder.")
    if os.path.ismount(resolved):
        raise CheckpointError(
            f"the output {folder} is a mount point, which cannot be replaced in one step; name a folder inside it."
        )
    _probe(folder, resolved)


def require_space(folder: Path, needed: int) -> None:
    """Refuse an output that the disk has no room for; an earlier output stays beside it until it is whole.

    Raises:
        CheckpointError: if less than ``needed`` bytes are free.
    """
    place = nearest(folder.resolve())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise CheckpointError(
            f"the output {folder} needs about {needed / 1e6:,.1f} MB and {place} has {free / 1e6:,.1f} MB free; free "
            "some space or name a folder on another disk."
        )


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder to write in; on success it takes the place of ``folder``, on failure it vanishes.

    Files in an earlier ``folder`` that the earlier merge did not write are carried over.

    Raises:
        CheckpointError: if the place cannot be used, is in use, or the disk fails; what was there stays.
    """
    check_output(folder)
    target = folder.resolve()  # behind a link: the link stays, its target is replaced
    staging = target.with_name(f".{target.name}.partial-{os.getpid()}")
    with _say_what_failed(folder), output_lock(target) as locked:
        _sweep(target, locked)
        staging.mkdir(parents=True)
        try:
            yield staging
            _complete(staging, target)
            _swap(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def staged_together(folder: Path, processes: Processes) -> Iterator[Path]:
    """The same for several processes: the first makes the folder and puts it in its place, all write in it.

    Args:
        folder: as for :func:`staged_folder`.
        processes: all of which make this call.

    Yields:
        The folder to write in.

    Raises:
        CheckpointError: on the process that fails; on the others, that one has failed.
    """
    with ExitStack() as held, _say_what_failed(folder):
        yield processes.lead(lambda: held.enter_context(staged_folder(folder)))
        processes.lead(held.close)  # where the outcome of all was good


@contextmanager
def _say_what_failed(folder: Path) -> Iterator[None]:
    """Have a failing system call say which output it was about, and that the earlier one is whole."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the output {folder} could not be written ({error}); what was there before is untouched. Mend that, or "
            "name another folder, and do it again: the result will be the same."
        ) from error


def recover_output(folder: Path) -> None:
    """Bring back an earlier output that a kill between the two renames of an exchange left aside."""
    folder = folder.resolve()
    for _ in range(100):
        aside = [path for path in _beside(folder, "old") if (path / STATE_FILE).exists()]
        if not folder.name or folder.exists() or not aside:
            return
        try:
            with output_lock(folder):
                if not folder.exists():
                    os.rename(aside[-1], folder)
            return
        except BusyError:  # a living process is between its two renames
            time.sleep(0.02)
        except (CheckpointError, OSError):  # a reader who may not write there
            return


def nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def _probe(folder: Path, resolved: Path) -> None:
    """See that a folder can be made beside the output, where it is written before it takes its place."""
    probe = resolved.with_name(f".{resolved.name}.probe-{os.getpid()}")
    try:
        if probe.parent.exists():
            probe.mkdir()
            with contextlib.suppress(FileNotFoundError):  # swept away by a process that has the lock
                probe.rmdir()
        elif not os.access(nearest(probe), os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied")
    except OSError as error:
        raise CheckpointError(
            f"the output {folder} cannot be written ({error.strerror}); name another folder."
        ) from error


def _sweep(folder: Path, locked: bool) -> None:
    """Remove what killed processes left beside an output; who has the lock knows that they are gone."""
    kinds = ("partial", "probe", "old") if folder.exists() else ("partial", "probe")
    for path in (path for kind in kinds for path in _beside(folder, kind)):
        if locked or not _alive(path):
            shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.parent.glob(f".{glob.escape(folder.name)}.{kind}-*"))


def _alive(path: Path) -> bool:
    """Whether the process whose number ends a name still runs; only asked where there are no locks.

    A number that is this process's own was given again: the process that left the folder is gone. It is not asked by
    ``os.kill(number, 0)``, which on Windows ends a process.
    """
    number = path.name.rpartition("-")[2]
    if not number.isdecimal():  # no process has left this
        return True
    return int(number) != os.getpid() and int(number) < 2**31 and psutil.pid_exists(int(number))


def _complete(staging: Path, folder: Path) -> None:
    """Add what the user put into an earlier output, and see that all of it is on the disk."""
    written = sorted(path.name for path in staging.iterdir())
    state = json.loads((staging / STATE_FILE).read_text())
    (staging / STATE_FILE).write_text(json.dumps(state | {"files": written}, indent=1, allow_nan=False))
    if (folder / STATE_FILE).exists():
        ours = set(read_state(folder).get("files", ()))
        for path in folder.iterdir():
            # weights are never carried over: an earlier shard beside new ones would be read with them
            if path.name in ours or (staging / path.name).exists() or is_weights(path):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, staging / path.name, symlinks=True)
            else:
                shutil.copyfile(path, staging / path.name, follow_symlinks=False)
    for path in (*staging.rglob("*"), staging):
        if not path.is_symlink() and (path.is_file() or (path.is_dir() and os.name == "posix")):
            _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swap(staging: Path, folder: Path) -> None:
    """Put ``staging`` in the place of ``folder``; a reader sees the old folder or the new one."""
    if not folder.exists():
        os.rename(staging, folder)
    elif not _exchange(staging, folder):
        old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
        os.rename(folder, old)
        try:
            os.rename(staging, folder)
        except BaseException:
            os.rename(old, folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(OSError):  # the new folder is in its place already
        _sync(folder.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step (``renameat2`` of Linux); ``False`` where system or file system cannot."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    at_cwd, exchange = -100, 2
    return rename is not None and rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0
