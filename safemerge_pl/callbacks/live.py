"""Merging inside a training loop: when tasks end, what is folded, and which weights the module holds when."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from safemerge_pl.callbacks.guards import (
    check_plan,
    refuse_untrained,
    require_same,
    require_untrained,
    require_validation,
    say_what_is_merged,
    several_tasks,
)
from safemerge_pl.callbacks.monitoring import announce_scores, refuse_unseen
from safemerge_pl.callbacks.options import LiveOptions
from safemerge_pl.callbacks.part import MergePart, require_started
from safemerge_pl.callbacks.reloading import require_new_loader, require_reload
from safemerge_pl.callbacks.scores import StreamScores
from safemerge_pl.checkpoints.open import CheckpointError
from safemerge_pl.data.stream import TaskStream
from safemerge_pl.live import LiveMerger, require_choices
from safemerge_pl.merger import FoldReport
from safemerge_pl.output.folders import check_output
from safemerge_pl.runtime.files import local_path

__all__ = ["Live"]

OnScores = Callable[[L.Trainer, L.LightningModule, dict[str, float], Sequence[str]], None]


class Live:
    """What :class:`MergeCallback` does in a training loop; its hooks call the methods of the same names.

    The task in progress is trained as if nothing were here. After its last batch (optimiser step included) it is
    folded, so that this boundary's validation and checkpoints see the merged weights. Before the next batch the
    pretrained weights return, with a fresh optimiser and scheduler.

    Args:
        part: what is merged, and how.
        options: see :class:`LiveOptions`.
        on_fold: called with trainer and report after each fold, when the merged weights are in the module.
        on_scores: called with trainer, module, scores and the names of the control sets once a merge has been scored.

    Attributes:
        merger: made when the first ``fit`` starts.

    Raises:
        ValueError: if options contradict each other.
    """

    def __init__(
        self,
        part: MergePart,
        options: LiveOptions,
        *,
        on_fold: Callable[[L.Trainer, FoldReport], None],
        on_scores: OnScores,
    ) -> None:
        self.part, self.options, self.on_fold, self.on_scores = part, options, on_fold, on_scores
        self.epochs_per_task, self.boundary = options.get("epochs_per_task"), options.get("boundary")
        if (self.epochs_per_task is None) == (self.boundary is None):
            raise ValueError(
                f"`{next(iter(options))}` is about merging in a training loop, which needs either `epochs_per_task` "
                "or `boundary`."
            )
        if self.epochs_per_task is not None and self.epochs_per_task < 1:
            raise ValueError(f"`epochs_per_task` must be at least 1, got {self.epochs_per_task}.")
        require_choices(options.get("restart_from", "pretrained"), options.get("rest", "pretrained"))
        self.planned = list(TaskStream(options["tasks"])) if "tasks" in options else None
        self.scores = StreamScores(options.get("metric"), options.get("score"), options.get("controls", ()))
        if self.scores.metric is not None and isinstance(self.boundary, str):
            raise ValueError(
                f"with `boundary='{self.boundary}'` a task ends after its last validation, so `metric` never sees the "
                "merged weights; use `score`."
            )
        self.merger: LiveMerger | None = None
        self.unsettled = False  # the module may still take up other weights before the first batch
        self.epochs = 0  # finished epochs of the task in progress
        self.closed = False  # the current epoch is counted
        self.cut_short = False  # its loader ended before its length, and Lightning skipped the validation
        self.merged_in_place = False  # the module holds the merged weights, not those in training
        self.unscored = False  # folded, but its validation is still to come
        self.resumed = False  # and no task has begun since
        self.checked = False  # that `metric` is logged
        self.loader: Any = None  # of the task in progress
        self.current: str | None = None  # what the `boundary` attribute says

    @property
    def tasks(self) -> list[str]:
        """Names folded so far, in order."""
        return [] if self.merger is None else self.merger.tasks

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, *, known: bool) -> None:
        """Refuse a plan that cannot work. ``known``: what the module began with is kept."""
        refuse_untrained(pl_module)
        check_plan(trainer, self.options, self.tasks_left(trainer), self.epochs)
        if "output" in self.options and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            check_output(local_path(self.options["output"]))
        if self.merger is None and "pretrained" not in self.options and not known:
            require_untrained(trainer, pl_module)

    def capture(self, trainer: L.Trainer, pl_module: L.LightningModule, *, resumed: bool) -> None:
        """Take the module's weights for the pretrained ones, once; later, see that the module is of that kind."""
        if self.merger is None:
            given = "pretrained" in self.options
            if not (resumed or given):
                require_untrained(trainer, pl_module)
            self.merger, self.unsettled = self._make(pl_module), not (resumed or given)
            return
        try:
            self.merger.attach(self.part.target(pl_module))
        except ValueError as error:
            raise MisconfigurationException(f"this module cannot be merged: {error}") from error

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before the first step, when the loaders are known: refuse what cannot work."""
        require_validation(trainer, self.options)
        measured = self.scores.metric is not None or self.scores.score is not None
        if measured:
            announce_scores(trainer, self.scores.controls)
        late = (
            f"with `boundary='{self.boundary}'` a task is merged after its last validation, too late for that; read "
            "`trainer.callback_metrics` after `fit`"
        )
        refuse_unseen(trainer, measured=measured, never=late if isinstance(self.boundary, str) else "")
        if several_tasks(trainer, self.options, self.epochs):
            require_reload(trainer, self.epochs_per_task, self.epochs, resumed=self.resumed)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule, restored: dict[str, Any] | None) -> None:
        """Take up a restored position."""
        merger = require_started(self.merger)
        self.resumed = restored is not None
        if restored is not None:
            try:
                merger.load_training_state(restored["live"])
            except CheckpointError as error:
                late = "another pretrained model" in str(error)
                hint = (
                    " The module must hold its pretrained weights after `setup` and `configure_model`, before any "
                    "checkpoint is loaded into it; if it was loaded before (`validate`), make a new one."
                )
                message = f"this checkpoint cannot be resumed: {error}{hint if late else ''}"
                raise MisconfigurationException(message) from error
            for key in ("epochs", "closed", "merged_in_place", "unscored", "current"):
                setattr(self, key, restored[key])
            self.scores.rows = list(restored["rows"])
            self.checked = True  # a resumed validation may be the rest of one

    def begin_batch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before a batch: as before an epoch; before the very first, the weights that it starts from are there."""
        self.begin(trainer, pl_module)
        self.loader = trainer.train_dataloader
        merger = require_started(self.merger)
        if self.unsettled and not merger.is_at_start():
            self.merger = self._make(pl_module)
            self.merger.device, self.merger.processes = merger.device, merger.processes
            self.merger.progress = merger.progress
        self.unsettled = False

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before an epoch or batch: see whether the data changed its task, and start the next one."""
        self.closed = False
        if isinstance(self.boundary, str) and self.boundary != "fit":
            found = str(getattr(trainer.datamodule, self.boundary))  # type: ignore[attr-defined]
            if self.current not in (None, found) and not self.merged_in_place:
                self._fold(trainer, pl_module)
            self.current = found
        if not self.merged_in_place:
            return
        self._require_scored()
        self.resumed = False
        task = self._next_task(trainer)
        if task in self.tasks:
            raise MisconfigurationException(
                f"task '{task}' is merged already, and a task is merged once; give its second training another name."
            )
        require_new_loader(trainer, self.loader)
        require_started(self.merger).restart()
        trainer.strategy.setup_optimizers(trainer)  # fresh optimiser state and schedules
        self.merged_in_place = False
        if self.scores.rows:
            announce_scores(trainer, self.scores.controls)  # those of the merge are not those of a task in training

    def end_epoch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """After the last batch of an epoch, once: fold if the task ends here."""
        if self.closed:
            return
        self.closed, self.cut_short = True, not trainer.is_last_batch
        self.epochs += 1
        due = self.epochs >= self.epochs_per_task if self.epochs_per_task is not None else False
        if callable(self.boundary):
            due = bool(trainer.strategy.broadcast(bool(self.boundary(trainer))))  # one answer for all processes
        if due or (trainer.fast_dev_run and self.boundary != "fit"):  # type: ignore[attr-defined]
            self._fold(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Enter what the module logged, if it scored the merged weights; the first time see that it logs it at all."""
        if self.scores.metric is None:
            return
        planned = self._planned(trainer) or [f"task{i + 1}" for i in range(len(trainer.num_val_batches))]
        if not (self.checked or self.unscored):
            self.scores.check(trainer, planned)
        self.checked = True
        if self.unscored:
            self.unscored = False
            self._enter(trainer, pl_module, self.scores.read(trainer, planned))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Fold the last task where only the end of ``fit`` shows that it is complete; say what was not merged."""
        if isinstance(self.boundary, str) and not self.merged_in_place:
            self._fold(trainer, pl_module)
        if not self.tasks:
            raise MisconfigurationException(
                f"no task was merged: the run ended after {self.epochs} epochs and no boundary was reached; see "
                "`epochs_per_task`, `boundary`, and what stopped the run."
            )
        self._require_scored()
        if not self.merged_in_place:
            rank_zero_warn(
                f"the run ended inside a task, {self.epochs} epochs after '{self.tasks[-1]}' was merged: the "
                "module holds the weights in training; resume to finish the task, or call "
                "`callback.merger.apply_merged()` for the merge of the finished ones."
            )
        if "output" in self.options and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            if trainer.is_global_zero:
                require_started(self.merger).save(self.options["output"])
            trainer.strategy.barrier()

    def state_dict(self) -> dict[str, Any]:
        """The merged weights and the position in the loop; the module's own state holds the weights in training."""
        if self.merger is None:
            return {}
        return {
            "live": self.merger.training_state(),
            "epochs": self.epochs,
            "closed": self.closed,
            "merged_in_place": self.merged_in_place,
            "unscored": self.unscored,
            "current": self.current,
            "rows": list(self.scores.rows),
        }

    def _make(self, pl_module: L.LightningModule) -> LiveMerger:
        options = self.options
        try:
            merger = LiveMerger(
                self.part.target(pl_module),
                self.part.method,
                layers=self.part.layers,
                pretrained=options.get("pretrained"),
                restart_from=options.get("restart_from", "pretrained"),
                rest=options.get("rest", "pretrained"),
                max_response=self.part.max_response,
            )
        except ValueError as error:
            raise MisconfigurationException(f"this module cannot be merged: {error}") from error
        say_what_is_merged(merger, self.part.module_attr, type(pl_module).__name__)
        return merger

    def _fold(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        merger, task = require_started(self.merger), self._next_task(trainer)
        report = merger.fold_trained(task, f"trained until step {trainer.global_step}")
        require_same(trainer, task, (report.incoming, report.merged))
        self.epochs, self.merged_in_place = 0, True
        setattr(pl_module, "merged_tasks", merger.tasks)  # noqa: B010  # whoever captures it next must know
        self.on_fold(trainer, report)
        rank_zero_info(f"merged '{task}' ({report.kept_fraction:.0%} of its task vector, {report.seconds:.1f} s)")
        for note in report.notes:
            rank_zero_warn(f"task '{task}': {note}.")
        if self.scores.score is not None:
            self._enter(trainer, pl_module, self.scores.call(trainer, pl_module))
        self.unscored = self.scores.metric is not None and not trainer.fast_dev_run  # type: ignore[attr-defined]

    def _enter(self, trainer: L.Trainer, pl_module: L.LightningModule, found: dict[str, Any]) -> None:
        found = trainer.strategy.broadcast({name: float(value) for name, value in found.items()})
        scores = self.scores.enter(found, self.tasks, trainer.callback_metrics)
        self.on_scores(trainer, pl_module, scores, self.scores.controls)

    def _require_scored(self) -> None:
        if self.unscored and self.resumed:  # Lightning does not validate after a checkpoint taken at the last step
            rank_zero_warn(
                f"this checkpoint was taken between the merge of '{self.tasks[-1]}' and its validation: its row "
                "of the accuracy matrix is lost, and with it BWT."
            )
            self.unscored = False
        if self.unscored and self.cut_short:
            raise MisconfigurationException(
                f"no validation ran after '{self.tasks[-1]}' was merged, so `metric` has no value: the training loader "
                "gave fewer batches than its length says, and Lightning then skips the validation; correct the "
                "length, or use `score`."
            )
        if self.unscored:
            raise MisconfigurationException(
                f"no validation ran after '{self.tasks[-1]}' was merged, so `metric` has no value; validate at "
                "the end of every task (`check_val_every_n_epoch`, `val_check_interval`), or use `score`."
            )

    def tasks_left(self, trainer: L.Trainer) -> int | None:
        """Named tasks that are not merged yet; ``None`` where no names are given."""
        planned = self._planned(trainer)
        return len(planned) - len(self.tasks) if planned else None

    def named(self, trainer: L.Trainer) -> list[str]:
        """All tasks that have a name so far: those to come, too, where they are known."""
        return self._planned(trainer) or self.tasks

    def _planned(self, trainer: L.Trainer) -> list[str]:
        stream = getattr(getattr(trainer, "datamodule", None), "stream", None)
        return list(self.planned or stream or ())

    def _next_task(self, trainer: L.Trainer) -> str:
        """Name of the task in training, or about to be."""
        done, planned = len(self.tasks), self._planned(trainer)
        if self.current is not None:
            return self.current
        if planned and done >= len(planned):
            raise MisconfigurationException(
                f"all {done} tasks ({', '.join(planned)}) are merged, but the training goes on; end it there, or name "
                "more `tasks`."
            )
        return planned[done] if planned else f"task{done + 1}"
