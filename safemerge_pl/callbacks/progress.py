"""Progress of a merge stream: a bar during folding and scoring, and one permanent line per task."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TextIO, cast

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from safemerge_pl.callbacks.closing import last_drift
from safemerge_pl.callbacks.merge import MergeCallback
from safemerge_pl.functional import SCORES
from safemerge_pl.reports.tables import scores_table
from safemerge_pl.runtime.console import Tolerant, fit_line, say, show
from safemerge_pl.runtime.progress import FoldProgress
from safemerge_pl.scoring.scorer import Scorer

__all__ = ["StreamProgress", "show_scoring"]


class StreamProgress(ProgressBar):
    """Print one line per task. A terminal also shows a bar during the evaluation; a log file gets the lines alone."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._live: Any = None
        self._bar: Any = None
        self._start = 0.0
        self._folding = FoldProgress()

    def disable(self) -> None:
        """Print nothing (Lightning calls it on all ranks but the first)."""
        self._enabled = False

    def enable(self) -> None:
        """Print again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a line above the bar, in several where a terminal is not wide enough for it."""
        if not self._enabled:
            return
        line = fit_line(" ".join(map(str, args)))
        if self._live is not None:
            self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            say(line)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say what is coming."""
        merge = MergeCallback.of(trainer)
        if merge is not None:
            merge.ready(trainer, pl_module)
        if merge is not None and merge.merger is not None and self._enabled:
            merge.merger.progress = self._folding
        if merge is None or merge.live is not None:
            return
        count, layers = len(merge.sources), 0 if merge.merger is None else len(merge.merger.layers)
        begun = f", {len(merge.tasks)} of them merged before" if merge.tasks else ""
        self.print(f"{merge.method.label}: {count} tasks{begun}, {layers} layers each (accuracy in %)")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar."""
        self._open(sum(int(n) for n in trainer.num_val_batches if n != float("inf")))

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Move the bar."""
        self._advance()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar and print the task's line."""
        self._close()
        merge, scores = MergeCallback.of(trainer), getattr(pl_module, "last_scores", {})
        if trainer.sanity_checking:
            return
        if trainer.state.fn != TrainerFn.FITTING:
            self._print_scores(scores)
        elif merge is not None and merge.live is None and merge.tasks:
            report = merge.reports[-1]
            own = f"acc {100 * scores[report.task]:5.1f}  " if report.task in scores else ""
            stream = "  ".join(f"{key} {100 * scores[key]:.1f}" for key in SCORES if key in scores)
            drift = last_drift(trainer, report)
            stream += "" if drift is None else f"  drift {100 * drift:.1f}"
            width = max(len(task) for task in merge.sources)
            seconds = f"(fold {_seconds(report.seconds)}, score {_seconds(time.perf_counter() - self._start)})"
            seconds = seconds.replace(" ", "\xa0")  # it stands in one line
            self.print(f"{report.index:>3}/{len(merge.sources)} {report.task:<{width}}  {own}{stream}  {seconds}")
            for note in report.notes:
                self.print(f"      note: {note}")

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar."""
        self._open(sum(int(n) for n in trainer.num_test_batches if n != float("inf")))

    def on_test_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Move the bar."""
        self._advance()

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar and print the scores."""
        self._close()
        self._print_scores(getattr(pl_module, "last_scores", {}))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the terminal as it was."""
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave the terminal and the merger as they were."""
        self._close()
        merge = MergeCallback.of(trainer)
        if merge is not None and merge.merger is not None:
            merge.merger.progress = None

    @contextmanager
    def scoring(self, scorer: Scorer, sets: Sequence[str], what: str) -> Iterator[None]:
        """Show a bar while a scorer goes through sets outside of Lightning's loops.

        Args:
            scorer: what goes through them.
            sets: their names, as often as they are scored.
            what: is scored.
        """
        self._open(sum(map(scorer.data.count_batches, sets)), what)
        scorer.progress = self._advance
        try:
            yield
        finally:
            scorer.progress = None
            self._close()

    def _print_scores(self, scores: dict[str, float]) -> None:
        if self._enabled and scores:
            show(scores_table(scores))

    def _open(self, total: int, what: str = "") -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import Progress

        self._start = time.perf_counter()
        console = Console(file=cast(TextIO, Tolerant(sys.stdout)))
        if self._enabled and total and console.is_terminal:
            self._live = Progress(console=console, transient=True)
            self._bar = self._live.add_task(f"scoring {escape(what)}".rstrip(), total=total)
            self._live.start()

    def _advance(self, batches: int = 1) -> None:
        if self._live is not None:
            self._live.advance(self._bar, batches)

    def _close(self) -> None:
        self._folding.close()
        if self._live is not None:
            self._live.stop()
            self._live = None


def _seconds(passed: float) -> str:
    return f"{passed:.1f} s" if passed < 10 else f"{passed:.0f} s"


def show_scoring(trainer: L.Trainer, scorer: Scorer, sets: Sequence[str], what: str) -> AbstractContextManager[None]:
    """Show a bar while a scorer goes through sets, where the trainer's progress bar is a :class:`StreamProgress`.

    Args:
        trainer: of the run.
        scorer: what goes through the sets.
        sets: their names, as often as they are scored.
        what: is scored.
    """
    bar = trainer.progress_bar_callback
    return bar.scoring(scorer, sets, what) if isinstance(bar, StreamProgress) else nullcontext()
