"""Hand the jobs of a study to an executor, and take each result as it comes."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.runtime.console import say
from safemerge_pl.runtime.names import count_of
from safemerge_pl.study.bench import Job, measure_elsewhere
from safemerge_pl.study.executors import LocalProcesses

__all__ = ["spread"]


def spread(
    executor: Executor, pickled: bytes, jobs: Sequence[Job], keep: Callable[[Job, dict[str, Any]], None]
) -> None:
    """Measure jobs on an executor's workers.

    Args:
        executor: any; it stays open.
        pickled: a :class:`~safemerge_pl.study.bench.Bench` that is not loaded yet.
        jobs: in the order in which they are handed out.
        keep: called here with each job and its result, in the order in which they are done. After an error too, for
            jobs that had begun; those that had not are cancelled. At Ctrl-C and SIGTERM this machine's processes are
            ended with what they are at, other workers are waited for.

    Raises:
        MisconfigurationException: if the executor lost its workers, or a worker gives what is no result.
        Exception: what went wrong with a job.
    """
    waiting: dict[Future[str], Job] = {}
    try:
        for job in jobs:
            waiting[executor.submit(measure_elsewhere, pickled, job)] = job
        for done in as_completed(waiting):
            keep(waiting[done], _result(done))
            del waiting[done]
    except BaseException as error:
        for future in waiting:
            future.cancel()
        begun = [future for future in waiting if not future.done()]
        if isinstance(error, KeyboardInterrupt) and isinstance(executor, LocalProcesses):
            executor.kill()
        elif isinstance(error, KeyboardInterrupt) and begun:
            say(f"stopping; waiting for what {count_of(len(begun), 'worker')} had begun", error=True)
        for done in as_completed(begun):
            if not done.cancelled() and done.exception() is None:
                keep(waiting[done], _result(done))
        raise


def _result(done: "Future[str]") -> dict[str, Any]:
    """What a worker gave, read as data."""
    try:
        text = done.result()
    except (BrokenExecutor, CancelledError) as error:
        raise _lost(error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] == "distributed":
            raise _lost(error) from error
        raise
    try:
        content = json.loads(text)
        result, lines = dict(content["result"]), [str(line) for line in content["lines"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MisconfigurationException(
            f"a worker of the study gave what is no result ({error}); have all workers run this version."
        ) from error
    for line in lines:
        say(line)
    return result


def _lost(error: BaseException) -> MisconfigurationException:
    return MisconfigurationException(
        f"the study's executor lost its workers ({type(error).__name__}: {error}). Results so far are kept: start the "
        "study again to go on. If memory runs out, use fewer workers."
    )
