"""Other methods on the same models in the same order, scored once at the end: is it better than what I use today?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.callbacks.drift import DriftMonitor
from safemerge_pl.callbacks.merge import MergeCallback
from safemerge_pl.callbacks.progress import show_scoring
from safemerge_pl.folding.bound import MaxResponse, choose_bound, name_with_bound, require_drift_bound
from safemerge_pl.folding.processes import Processes
from safemerge_pl.folding.selection import plan_merge
from safemerge_pl.functional import SCORES
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import MergeMethod
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.scoring.drift import gauge_of, require_gauge
from safemerge_pl.scoring.rows import score_row
from safemerge_pl.scoring.weights import swapped_weights

__all__ = ["ComparedMethod", "MethodComparison"]


@dataclass
class ComparedMethod:
    """A method that the stream's own is compared with.

    Args:
        method: how it merges.
        max_response: bound on the response of what it merges, as of
            :class:`~safemerge_pl.callbacks.MergeCallback`.
        label: heading of its column; the method's name and its bounds if left out.
        max_drift: bound on the drift, likewise.
        layers: shell-style patterns of the parameters that it merges; left out, what the stream's own method is given.

    Example:
        >>> from safemerge_pl.methods import SafeShare, TaskArithmetic
        >>> ComparedMethod(TaskArithmetic()).label, ComparedMethod(SafeShare()).label
        ('Task Arithmetic', 'SAFE-Share, bound 0.035')
    """

    method: MergeMethod
    max_response: MaxResponse = "auto"
    label: str = ""
    max_drift: float | None = None
    layers: list[str] | str | None = None

    def __post_init__(self) -> None:
        require_drift_bound(self.max_drift)
        bound = choose_bound(self.method, self.max_response)
        self.label = self.label or name_with_bound(self.method, bound, self.max_drift)

    def layers_beside(self, merge: MergeCallback) -> str | Sequence[str] | None:
        """What it merges beside the method of a stream."""
        return merge.layers if self.layers is None else self.layers


class MethodComparison(L.Callback):
    """Fold the stream's models by other methods too, in the same order, and score where each ends.

    Each method gets a column in the closing table, the report and the figures, and ``compare/<label>/ACC``, ``Gen`` and
    ``H`` in the loggers. It costs one fold per task and one evaluation per method. The rows are saved in checkpoints,
    so a resumed run does not measure them again. A stream that was stopped early is not compared.

    Args:
        methods: what the stream's own method is compared with.

    Raises:
        MisconfigurationException: if two methods have one label.
    """

    heading: ClassVar[str] = "compared"
    """Where the rows stand in reports."""

    def __init__(self, methods: list[ComparedMethod] | None = None) -> None:
        super().__init__()
        self.methods = list(methods or ())
        labels = [entry.label for entry in self.methods]
        if len(set(labels)) < len(labels):
            raise MisconfigurationException(
                f"`compare`: two methods have one label; give each its own `label`, got {', '.join(labels)}."
            )
        self.rows: dict[str, dict[str, Any]] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a method that does not fit the model, before anything is merged or scored."""
        merge = MergeCallback.of(trainer)
        if not self.methods or merge is None or not isinstance(pl_module, ContinualMergeModule):
            return
        merge.ready(trainer, pl_module)
        assert merge.merger is not None
        for entry in self.methods:
            try:
                plan_merge(merge.merger.pretrained, entry.method, entry.layers_beside(merge))
                if entry.max_drift is not None:
                    require_gauge(pl_module.backbone, trainer.world_size)
            except ValueError as error:
                raise _name(entry, error) from error

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure what is missing, once every task is merged."""
        merge = MergeCallback.of(trainer)
        if not self.methods or merge is None or not isinstance(pl_module, ContinualMergeModule):
            return
        if trainer.fast_dev_run or merge.tasks != list(merge.sources):  # type: ignore[attr-defined]
            return
        for entry in self.methods:
            if entry.label not in self.rows:
                self.rows[entry.label] = self._measure(entry, trainer, pl_module, merge)
            row = self.rows[entry.label]
            scores = {f"compare/{entry.label}/{key}": row[key] for key in SCORES if key in row}
            for logger in trainer.loggers:
                logger.log_metrics(scores, step=len(merge.tasks))

    def _measure(
        self, entry: ComparedMethod, trainer: L.Trainer, pl_module: ContinualMergeModule, merge: MergeCallback
    ) -> dict[str, Any]:
        assert merge.merger is not None
        assert pl_module.scorer is not None
        bounds: dict[str, Any] = {"max_response": entry.max_response, "max_drift": entry.max_drift}
        if entry.max_drift is not None:
            gauge = gauge_of(pl_module.backbone, merge.target(pl_module), merge.merger.pretrained)
            bounds["gauge"] = None if gauge is None else gauge.measure
        try:
            merger = ContinualMerger(
                merge.merger.pretrained,
                entry.method,
                layers=entry.layers_beside(merge),
                device=merge.merger.device,
                on_mismatch=merge.on_mismatch,
                **bounds,
            )
            merger.processes = Processes(shared=trainer.world_size > 1)
            merger.progress = merge.merger.progress
            for task, source in merge.sources.items():
                merger.fold(source, task)
        except ValueError as error:
            raise _name(entry, error) from error
        with swapped_weights(merge.target(pl_module), merger.merged_parameters()):
            data = pl_module.scorer.data
            with show_scoring(trainer, pl_module.scorer, [*data.stream, *data.controls], entry.label):
                row = score_row(pl_module.scorer)
            monitor = DriftMonitor.of(trainer)
            drift = merger.reports[-1].drift if monitor is None else monitor.measure()
            if drift is not None:
                row["drift"] = drift
        bar = trainer.progress_bar_callback
        if bar is not None:
            scores = "  ".join(f"{key} {100 * row[key]:.1f}" for key in SCORES if key in row)
            bar.print(f"  {entry.label:<28} {scores}")
        return {**row, "merged": merger.fingerprint(), "settings": entry.method.settings()}

    def state_dict(self) -> dict[str, Any]:
        """The rows, as plain values."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the rows of an earlier run."""
        self.rows = dict(state_dict["rows"])


def _name(entry: ComparedMethod, error: ValueError) -> MisconfigurationException:
    """An error with the method that it comes from."""
    return MisconfigurationException(f"`compare`: {entry.label}: {error}")
