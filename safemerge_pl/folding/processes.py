"""Share the stacks of a fold out among the processes of a run; every process ends with every result, to the bit."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from safemerge_pl.methods.base import StackResult

__all__ = ["Processes"]

_Out = TypeVar("_Out")


class Processes:
    """The processes that fold together; outside ``torch.distributed`` this one alone.

    What is in a stack never depends on the number of processes, so neither do the bits of a result. All processes must
    make the same calls in the same order.

    Args:
        shared: share the work out if ``torch.distributed`` is running; else every process does all of it.

    Attributes:
        count: number of processes.
        rank: of this one.
        threads: threads of the first process; batches are sized by it everywhere.

    Example:
        >>> alone = Processes(shared=True)
        >>> alone.count, alone.mine(["a", "b", "c"])
        (1, ['a', 'b', 'c'])
    """

    def __init__(self, shared: bool) -> None:
        together = shared and dist.is_available() and dist.is_initialized()
        self.count = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        threads = [torch.get_num_threads()]
        if together:
            dist.broadcast_object_list(threads, src=0)
        self.threads: int = threads[0]

    def mine(self, batch: Sequence[_Out]) -> list[_Out]:
        """What this process has to do of a batch of equal costs."""
        return list(batch[self.rank :: self.count])

    def gather(self, found: Sequence[_Out]) -> list[_Out]:
        """Everybody's plain values for what :meth:`mine` gave them, in the order of the whole."""
        if self.count == 1:
            return list(found)
        shares: list[Any] = [None] * self.count
        dist.all_gather_object(shares, list(found))
        return [shares[place % self.count][place // self.count] for place in range(sum(map(len, shares)))]

    def agree(self, work: Callable[[], _Out]) -> _Out:
        """Do something that may fail here alone (a file that one machine lacks); if it fails anywhere, fail everywhere.

        Raises:
            RuntimeError: on the processes where ``work`` went well; elsewhere its own exception.
        """
        if self.count == 1:
            return work()
        failure: BaseException | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        messages: list[Any] = [None] * self.count
        dist.all_gather_object(messages, None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"process {rank} failed: {message}")
        return result

    def exchange(
        self, results: Sequence[tuple[StackResult, Any]], shapes: Sequence[tuple[int, ...]], device: torch.device
    ) -> list[tuple[StackResult, Any]]:
        """Everybody's results of a batch, in the batch's order.

        Args:
            results: of :meth:`mine`, each with plain values that go along.
            shapes: ``(L, d_out, d_in)`` of every stack of the batch.
            device: where the results are, the same kind for all.
        """
        if self.count == 1:
            return list(results)
        found = []
        for place, shape in enumerate(shapes):
            owner, turn = place % self.count, place // self.count
            message: list[Any] = [None]
            merged = torch.empty(shape, device=device)
            if owner == self.rank:
                result, extra = results[turn]
                merged = result.merged.contiguous()
                losses = None if result.losses is None else result.losses.cpu()
                message = [(losses, result.solve_seconds, extra)]
            dist.broadcast_object_list(message, src=owner, device=device)
            dist.broadcast(merged, src=owner)
            losses, seconds, extra = message[0]
            found.append((StackResult(merged, None, losses, seconds), extra))
        return found
