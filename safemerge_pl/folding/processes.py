"""The processes of a run that fold together: what they tell each other, and how one's failure reaches all."""

import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Board", "LostError", "PeerError", "Processes"]

_Out = TypeVar("_Out")

_BETWEEN_LOOKS = 0.1
"""Seconds between two looks at the board, which take a message to another process and back."""


class Board(Protocol):
    """Where processes leave notes for each other: a store of ``torch.distributed``."""

    def set(self, key: str, value: str, /) -> None:
        """Leave a note."""

    def get(self, key: str, /) -> bytes:
        """Read a note, once it is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether there are notes of these names."""

    def add(self, key: str, amount: int, /) -> int:
        """Count up, and give the new count."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait for notes of these names."""


class PeerError(RuntimeError):
    """Another process failed, and says why itself."""


class LostError(RuntimeError):
    """Another process is gone: killed, interrupted, or out of reach."""


class _StopWork(Exception):  # noqa: N818  # no error of this process, and never seen outside of this module
    """Another process has failed, so what this one is doing is of no use."""


class Processes:
    """The processes that fold together; outside ``torch.distributed`` this one alone.

    All processes must make the same calls in the same order. Work is done inside of :meth:`agree`, :meth:`share`,
    :meth:`collect` or :meth:`lead`, without any other call in it but :meth:`check`.

    Args:
        shared: share the work out if ``torch.distributed`` is running; else every process does all of it.
        apart: each process reads and holds what is its own alone; else every process ends with every result.
        board: where a process that fails leaves a note, so that the others need not work on to the end of their share.

    Attributes:
        count: number of processes.
        rank: of this one.
        apart: see above; ``False`` for a process that is alone.

    Example:
        >>> alone = Processes(shared=True)
        >>> alone.count, alone.gather("a"), alone.agree(lambda: "done"), alone.share(lambda: 2)
        (1, ['a'], 'done', [2])
    """

    def __init__(self, shared: bool, *, apart: bool = False, board: Board | None = None) -> None:
        together = shared and dist.is_available() and dist.is_initialized()
        self.count = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        self.apart = apart and self.count > 1
        self._board = board if together else None
        self._turn = 0  # of calls, the same everywhere
        self._next_look = 0.0

    def gather(self, value: _Out) -> list[_Out]:
        """Everybody's plain value, by rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(found, value)
        except RuntimeError as error:  # whatever the backend says when a connection ends
            raise self._lost() from error
        return found

    def agree(self, work: Callable[[], _Out]) -> _Out:
        """Do something that may fail here alone (a file that one machine lacks); if it fails anywhere, fail everywhere.

        Raises:
            PeerError: on the processes where ``work`` went well or was stopped; elsewhere its own exception.
            LostError: if a process is gone.
        """
        if self.count == 1:
            return work()
        return self._attempt(work, lambda result: None)[0]

    def share(self, work: Callable[[], _Out]) -> list[_Out]:
        """The same for work that has a plain result, which reaches all: everybody's, by rank.

        Raises:
            PeerError: as :meth:`agree`.
            LostError: likewise.
        """
        if self.count == 1:
            return [work()]
        return self._attempt(work, lambda result: result)[1]

    def collect(self, work: Callable[[], Mapping[str, _Out]]) -> dict[str, _Out]:
        """The same for plain values by name, each name at one process; raises as :meth:`agree`."""
        return {name: value for share in self.share(work) for name, value in share.items()}

    def lead(self, work: Callable[[], _Out]) -> _Out:
        """Do something on the first process alone, and give its plain result to all.

        Raises:
            PeerError: on the other processes if it fails; on the first its own exception.
        """
        return self.share(work if self.rank == 0 else lambda: None)[0]  # type: ignore[return-value]

    def _attempt(self, work: Callable[[], _Out], sent: Callable[[_Out], Any]) -> tuple[_Out, list[Any]]:
        """Own result, and what everybody sent of theirs; raises where it failed here or elsewhere."""
        self._turn += 1
        result: _Out | None = None
        failure: Exception | None = None
        message: str | None = None
        try:
            result = work()
        except _StopWork:
            failure = self._lost()  # unless somebody says why
        except BaseException as error:
            self.tell(error)
            if not isinstance(error, Exception):  # an interrupt: this process is leaving
                raise
            failure, message = error, f"{type(error).__name__}: {error}"
        everybody = self.gather((message, None if result is None else sent(result)))
        for rank, (told, _) in enumerate(everybody):
            if told is not None and message is None:
                raise PeerError(f"process {rank} failed: {told}")
        if failure is not None:
            raise failure
        return result, [found for _, found in everybody]  # type: ignore[return-value]

    def check(self) -> None:
        """Leave long work inside of :meth:`agree` early if another process has failed meanwhile."""
        if self._board is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _BETWEEN_LOOKS
        if self._left_note() is not None:
            raise _StopWork

    def tell(self, error: BaseException) -> None:
        """Leave a note that this process has failed."""
        told = {KeyboardInterrupt: "was interrupted", SystemExit: "was told to stop"}
        what = told.get(type(error), f"failed: {type(error).__name__}: {error}")
        if self._board is not None:
            with suppress(RuntimeError):  # the board is gone with the process that kept it; so are the connections
                self._board.set(self._note(), f"process {self.rank} {what}")

    def spread(
        self,
        tensors: MutableMapping[str, Tensor],
        shapes: Mapping[str, Iterable[int]],
        owners: Mapping[str, int],
        device: torch.device,
    ) -> None:
        """Give everybody's float32 tensors to all.

        Args:
            tensors: those of this process; filled up here.
            shapes: of all of them, in an order that is the same everywhere.
            owners: rank of the process that has each.
            device: by whose backend they are sent.

        Raises:
            LostError: if a process is gone.
        """
        if self.count == 1:
            return
        for name, shape in shapes.items():
            mine = owners[name] == self.rank
            sent = tensors[name].to(device) if mine else torch.empty(tuple(shape), device=device)
            try:
                dist.broadcast(sent, src=owners[name])
            except RuntimeError as error:
                raise self._lost() from error
            if not mine:
                tensors[name] = sent.cpu()

    def _note(self) -> str:
        return f"failed/{self._turn}"

    def _left_note(self) -> str | None:
        """What a process that failed in this turn has left; empty if even the board is gone."""
        if self._board is None:
            return None
        try:
            return self._board.get(self._note()).decode() if self._board.check([self._note()]) else None
        except RuntimeError:
            return ""

    def _lost(self) -> LostError:
        return LostError(
            f"another process of this fold is gone ({self._left_note() or 'it was killed, or is out of reach'}); the "
            "output is whole, the earlier one or the new one: start it again."
        )
