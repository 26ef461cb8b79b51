"""Join the processes that torchrun started; one of them speaks for all when something fails."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from safemerge_pl.errors import CheckpointError, SilentExit
from safemerge_pl.folding.processes import Board, LostError, PeerError, Processes

__all__ = ["choose_device", "join_processes"]

_TELLING = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_NEEDED = (*_TELLING, "MASTER_ADDR", "MASTER_PORT")

_PATIENCE = timedelta(hours=1)
"""How long a process waits for the slowest one at the end of their shares. One that dies is noticed at once; this is
for a machine that vanishes without a word."""

_FAREWELL = timedelta(seconds=10)
"""How long a process that failed waits for the first one to tidy up, before torchrun stops them all."""

_LETTING_GO = 0.05
"""Seconds before the group is destroyed, for gloo's threads to let go of the last tensors. They need Python's lock for
it, while torch 2.6 holds that lock and waits for these threads until they end: one that comes too late hangs."""


@contextmanager
def join_processes() -> Iterator[Processes]:
    """Join the processes that torchrun started for this program; this one is alone where it started none.

    They talk by gloo, and by NCCL where there are GPUs. Inside, an error of one process stops all, and is raised on one
    of them; the others exit with 1 and say nothing. Where ``torch.distributed`` is running already it is used and left
    as it is.

    Raises:
        CheckpointError: if the environment of torchrun is there in part, or a process is gone.
        SilentExit: on all processes but one, if one of them fails.

    Example:
        >>> with join_processes() as processes:
        ...     processes.count, processes.rank
        (1, 0)
    """
    _require_whole_environment()
    if dist.is_available() and dist.is_initialized():
        yield Processes(shared=True, apart=True)
        return
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Processes(shared=False)
        return
    if not dist.is_available():
        raise CheckpointError("this torch was built without torch.distributed; start one process, without torchrun.")
    board = _start()
    processes = Processes(shared=True, apart=True, board=board)
    try:
        with _leaving_on_sigterm(), _one_voice(processes, board):
            yield processes
    finally:
        time.sleep(_LETTING_GO)
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _start() -> Board:
    """Start ``torch.distributed``, and give the place for notes that comes with it."""
    rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
    store, rank, count = next(iter(rendezvous("env://", timeout=_PATIENCE)))
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        store=prefixed("group", store),
        rank=rank,
        world_size=count,
        timeout=_PATIENCE,
    )
    board: Board = prefixed("safemerge", store)
    return board


def choose_device(device: str) -> str:
    """Choose the GPU of this process among those of its machine, where torchrun started several processes.

    Args:
        device: as the user gave it; anything but a plain ``cuda`` stays as it is.

    Raises:
        CheckpointError: if the machine has fewer GPUs than processes.

    Example:
        >>> choose_device("cpu")
        'cpu'
    """
    if device != "cuda" or "LOCAL_RANK" not in os.environ:
        return device
    place, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if place >= there:
        raise CheckpointError(
            f"process {place + 1} of this machine has no GPU, for it has {there}; start as many processes with "
            "--nproc_per_node as it has GPUs."
        )
    torch.cuda.set_device(place)  # also for whatever asks for no GPU in particular
    return f"cuda:{place}"


def _require_whole_environment() -> None:
    """Refuse variables of torchrun that are there in part, or are no numbers."""
    given = [name for name in _TELLING if name in os.environ]
    missing = [name for name in _NEEDED if name not in os.environ]
    if given and missing:
        raise CheckpointError(
            f"the environment has {' and '.join(given)} but not {' and '.join(missing)}: start several processes with "
            f"torchrun, which sets all of them, or unset {' and '.join(given)} for one process."
        )
    for name in given:
        if not os.environ[name].isdecimal():
            raise CheckpointError(f"{name} is {os.environ[name]!r}, no number; start several processes with torchrun.")


@contextmanager
def _one_voice(processes: Processes, board: Board) -> Iterator[None]:
    """Raise what went wrong on one process, and exit quietly on the others once the first has tidied up."""
    try:
        yield
    except SystemExit as stop:  # torchrun, or a parser that has said why
        processes.tell(stop)
        raise
    except BaseException as error:
        if not isinstance(error, (PeerError, LostError)):
            processes.tell(error)
        speaks = not isinstance(error, PeerError) and _is_first_to_speak(processes, board)
        with suppress(RuntimeError):
            if processes.rank:
                board.wait(["tidy"], _FAREWELL)
            else:
                board.set("tidy", "")
        if not speaks:
            raise SilentExit(1) from None
        if isinstance(error, KeyboardInterrupt) and processes.rank:  # on the first it is told by what runs there
            print("safemerge: interrupted; the output is as it was.", file=sys.stderr)
            raise SystemExit(130) from None
        if isinstance(error, LostError):
            raise CheckpointError(str(error)) from error
        raise


def _is_first_to_speak(processes: Processes, board: Board) -> bool:
    try:
        return board.add("speakers", 1) == 1
    except RuntimeError:  # the board is gone with the process that kept it
        return processes.rank == min(1, processes.count - 1)


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """Leave as by an exit when torchrun stops a process, so that temporary folders are removed."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: it is leaving already
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
