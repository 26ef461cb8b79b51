"""Show the progress of a long fold: a bar on a terminal, a line every half minute in a log."""

import sys
import time
from types import TracebackType
from typing import Any, TextIO, cast

from safemerge_pl.runtime.console import Tolerant, is_quiet, say

__all__ = ["FoldProgress"]


class FoldProgress:
    """Show on standard error how far a fold has come; a short fold shows nothing.

    Set it as :attr:`ContinualMerger.progress`, which is called after every stack. As a context manager it removes the
    bar at the end, also after an error.

    Args:
        after: seconds before the bar appears on a terminal.
        every: seconds between two lines of a log.
    """

    def __init__(self, after: float = 1.0, every: float = 30.0) -> None:
        self.after, self.every = after, every
        self._task: str | None = None
        self._start = self._last = 0.0
        self._bar: Any = None

    def __call__(self, task: str, done: int, total: int) -> None:
        """Update what is shown.

        Args:
            task: name of the incoming task; a new one starts again.
            done: number of weights that are merged.
            total: number of weights to merge.
        """
        if is_quiet():
            return
        now = time.monotonic()
        if task != self._task or done == 0:
            self.close()
            self._task, self._start, self._last = task, now, now
        elif done >= total:
            self.close()
        elif sys.stderr.isatty():
            self._show(task, done, total)
        elif now - self._last >= self.every:
            self._last = now
            left = (now - self._start) * (total - done) / done
            say(f"{task}: {done / total:.0%} merged, about {left:.0f} s left", error=True)

    def _show(self, task: str, done: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        if self._bar is None:
            if time.monotonic() - self._start < self.after:
                return
            self._bar = Progress(console=Console(file=cast(TextIO, Tolerant(sys.stderr))), transient=True)
            self._bar.add_task(f"folding {task}", total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done)

    def close(self) -> None:
        """Remove the bar and leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def __enter__(self) -> "FoldProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
