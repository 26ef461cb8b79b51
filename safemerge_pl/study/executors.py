"""Executors for studies: processes of this machine, and a Dask cluster. Any other of ``concurrent.futures`` will do."""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context, resource_tracker
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.runtime.console import say

__all__ = ["DaskExecutor", "LocalProcesses", "own_gpu"]

_Out = TypeVar("_Out")

_number = 0
"""Of this process among those of its machine that work for one executor."""


class LocalProcesses(Executor):
    """Processes of this machine, each on its own: one that is killed costs the call that it was at, which is repeated.

    (All processes of ``ProcessPoolExecutor`` end with the first one that is killed.) Where there are GPUs, process
    ``i`` works on GPU ``i``, and they start again with the first if there are more processes. A script needs the usual
    ``if __name__ == "__main__":`` guard.

    Args:
        processes: how many.
        threads: threads of each; its share of those that torch may use here if left out.
        retries: how often a call is repeated whose process was killed.

    Example:
        >>> with LocalProcesses(2, threads=4) as executor:  # none is started before the first call
        ...     executor.processes, executor.threads
        (2, 4)
    """

    def __init__(self, processes: int, threads: int | None = None, retries: int = 2) -> None:
        if processes < 1:
            raise MisconfigurationException(f"`processes` must be at least 1, got {processes}.")
        self.processes, self.retries = processes, retries
        self.threads = threads or max(1, torch.get_num_threads() // processes)
        self._pools: dict[int, ProcessPoolExecutor] = {}
        self._killed = False
        self._place = threading.local()
        self._keepers = ThreadPoolExecutor(processes, "safemerge-study", _hold_off_ctrl_c)
        self._numbers = iter(range(processes))

    def submit(self, fn: Callable[..., _Out], /, *args: Any, **kwargs: Any) -> "Future[_Out]":
        """See :class:`concurrent.futures.Executor`."""
        self._killed = False
        return self._keepers.submit(self._call, fn, args, kwargs)

    def kill(self) -> None:
        """End all processes with the calls that they are at; others are started for what is submitted later.

        Example:
            >>> import time
            >>> with LocalProcesses(1) as executor:
            ...     endless = executor.submit(time.sleep, 10_000)
            ...     executor.kill()
            ...     type(endless.exception()).__name__, executor.submit(pow, 2, 3).result()
            ('BrokenExecutor', 8)
        """
        self._killed = True
        for pool in list(self._pools.values()):
            _terminate(pool)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See :class:`concurrent.futures.Executor`."""
        self._keepers.shutdown(wait, cancel_futures=cancel_futures)
        for pool in list(self._pools.values()):
            pool.shutdown(wait, cancel_futures=cancel_futures)

    def _call(self, fn: Callable[..., _Out], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Out:
        """Run in the process that belongs to this thread."""
        if not hasattr(self._place, "number"):
            self._place.number = next(self._numbers)
        number: int = self._place.number
        for attempt in range(self.retries + 1):
            if number not in self._pools:
                settings = (self.threads, number)
                self._pools[number] = ProcessPoolExecutor(1, get_context("spawn"), _take_place, settings)
            pool = self._pools[number]
            try:
                result = pool.submit(fn, *args, **kwargs)
                if self._killed:  # while the process was started
                    _terminate(pool)
                return result.result()
            except BrokenExecutor as error:
                self._pools.pop(number).shutdown(wait=False)
                if self._killed:
                    raise BrokenExecutor("the processes were ended") from error
                if attempt == self.retries:
                    raise BrokenExecutor(f"{attempt + 1} processes in a row were killed at one call") from error
                say("a process of the study was killed; what it was at is measured again", error=True)
        raise AssertionError("the last attempt returns or raises")


class DaskExecutor(Executor):
    """Workers of a Dask cluster. A worker that is killed costs the call that it was at, which Dask repeats elsewhere.

    Needs ``pip install 'safemerge_pl[cluster]'``. Nothing is started or connected before the first call.

    Dask's workers and whoever reaches the scheduler may run code as you: keep it in a network that you trust, or have
    Dask use TLS (``distributed.comm`` of its own configuration, which holds here too).

    Args:
        address: of a scheduler, such as ``tcp://10.0.0.1:8786``; a cluster of this machine's processes if left out.
        workers: processes of the cluster on this machine; if left out one, or one per GPU if ``resources`` has ``GPU``.
        threads: threads that torch may use in a worker. By default a worker's own setting, which is 1 unless
            ``OMP_NUM_THREADS`` says otherwise, or its share of this machine.
        resources: what a call takes of a worker, by Dask's names: ``{"GPU": 1}`` has a worker that was started with
            ``--resources GPU=1`` do one call at a time, and others none.
        retries: how often a call that ended with an error is repeated.

    Example:
        >>> DaskExecutor("tcp://10.0.0.1:8786", resources={"GPU": 1}).address
        'tcp://10.0.0.1:8786'
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        threads: int | None = None,
        resources: dict[str, float] | None = None,
        retries: int = 1,
    ) -> None:
        if address is not None and workers is not None:
            raise MisconfigurationException(
                "`workers` are those of a cluster on this machine; a scheduler with an `address` has its own."
            )
        if workers is not None and workers < 1:
            raise MisconfigurationException(f"`workers` must be at least 1, got {workers}.")
        gpus = torch.cuda.device_count() if "GPU" in (resources or {}) else 0
        self.address, self.workers = address, workers or max(gpus, 1)
        if threads is None and address is None:
            threads = max(1, torch.get_num_threads() // self.workers)
        self.threads, self.resources, self.retries = threads, resources or {}, retries
        self._client: Any = None
        self._cluster: Any = None
        self._inner: Any = None

    def submit(self, fn: Callable[..., _Out], /, *args: Any, **kwargs: Any) -> "Future[_Out]":
        """See :class:`concurrent.futures.Executor`."""
        if self._inner is None:
            self._connect()
        future: Future[_Out] = self._inner.submit(_call_on_worker, self.threads, fn, args, kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See :class:`concurrent.futures.Executor`; a scheduler with an address goes on."""
        if self._inner is not None:
            self._inner.shutdown(wait=wait and not cancel_futures)
            self._client.close()
        if self._cluster is not None:
            self._cluster.close()

    def _connect(self) -> None:
        try:
            from dask import config
            from distributed import Client, LocalCluster
        except ImportError as error:
            raise MisconfigurationException("Dask is not installed; pip install 'safemerge_pl[cluster]'.") from error
        if self.address is None:
            with config.set({"distributed.worker.daemon": False}):  # images are read by processes of the workers
                self._cluster = LocalCluster(
                    n_workers=self.workers,
                    threads_per_worker=1,
                    memory_limit=None,  # Dask would kill a worker that holds a large model
                    dashboard_address=None,
                    resources=self.resources or None,
                )
        try:
            self._client = Client(self._cluster or self.address, set_as_default=False)
        except (OSError, ValueError) as error:
            raise MisconfigurationException(f"no Dask scheduler answers at {self.address} ({error}).") from error
        self._inner = self._client.get_executor(pure=False, retries=self.retries, resources=self.resources or None)
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        able = [w for w in workers if all(w["resources"].get(name, 0) >= n for name, n in self.resources.items())]
        say(f"Dask at {self._client.scheduler.address}: {len(able)} workers so far that take cells")


def _call_on_worker(
    threads: int | None, fn: Callable[..., _Out], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Out:
    from distributed import get_worker

    name = get_worker().name
    _take_place(threads, name if isinstance(name, int) else 0)
    try:
        return fn(*args, **kwargs)
    except AssertionError as error:
        if "daemonic" not in str(error):
            raise
        raise MisconfigurationException(
            "this Dask worker may not start processes that read images; start it with "
            "DASK_DISTRIBUTED__WORKER__DAEMON=False, or set `num_workers` of the data to 0."
        ) from error


def _take_place(threads: int | None, number: int) -> None:
    """Give this process its threads, and its GPU if it comes to use one.

    Args:
        threads: that torch may use; ``None`` leaves them as they are.
        number: of the process among those of its machine, from 0.
    """
    global _number
    if threads is not None:
        torch.set_num_threads(threads)
    _number = number


def _hold_off_ctrl_c() -> None:
    """Keep Ctrl-C from the processes that this thread starts: they inherit what it blocks, and are ended by `kill`."""
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # its start would unblock the signal again
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _terminate(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool, which has no public way to do so before Python 3.14."""
    for process in list((pool._processes or {}).values()):
        process.terminate()


def own_gpu() -> str:
    """The GPU that this process works on: the first, or that of its number where it is a worker.

    Example:
        >>> own_gpu()
        'cuda:0'
    """
    return f"cuda:{_number % max(torch.cuda.device_count(), 1)}"
