"""Fold checkpoints into the module, one at the start of each epoch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.callbacks.monitoring import announce_scores, refuse_unseen
from safemerge_pl.callbacks.part import MergePart, require_started
from safemerge_pl.checkpoints.module_weights import holds_exactly
from safemerge_pl.checkpoints.open import CheckpointError, Source
from safemerge_pl.data.experts import Experts, find_experts
from safemerge_pl.folding.reparametrised import refuse_computed
from safemerge_pl.merger import ContinualMerger, FoldReport
from safemerge_pl.metrics import AccuracyMatrix
from safemerge_pl.scoring.drift import gauge_of, require_gauge

__all__ = ["FromFiles"]


class FromFiles:
    """What :class:`MergeCallback` does with checkpoints; its hooks call the methods of the same names.

    Args:
        part: what is merged, and how.
        experts: where the fine-tuned models are, see :class:`MergeCallback`.
        on_fold: called with trainer and report after each fold, when the merged weights are in the module.

    Attributes:
        sources: model of each task, in stream order; known from ``setup`` on.
        merger: made when the first ``fit`` starts.
    """

    def __init__(self, part: MergePart, experts: Experts, *, on_fold: Callable[[L.Trainer, FoldReport], None]) -> None:
        self.part, self.experts, self.on_fold = part, experts, on_fold
        self.sources: dict[str, Source] = {}
        self.merger: ContinualMerger | None = None
        self.unsettled = False  # the module may still take up other weights before the first fold

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, *, known: bool) -> None:
        """Find the models; refuse a run that cannot merge them. ``known``: what the module began with is kept."""
        self.sources = find_experts(self.experts, self._stream(trainer))
        if trainer.limit_train_batches == 0:
            raise MisconfigurationException("`limit_train_batches` is 0: no epoch would run and nothing be merged.")
        epochs = trainer.max_epochs
        if epochs is not None and not 0 <= epochs <= len(self.sources):
            raise MisconfigurationException(
                f"`max_epochs` is {epochs} but the stream has {len(self.sources)} tasks, one an epoch; set it to "
                f"{len(self.sources)}, or less to stop early."
            )
        if self.merger is None and not known:
            _require_unmerged(pl_module)

    def capture(self, trainer: L.Trainer, pl_module: L.LightningModule, *, resumed: bool) -> None:
        """Take the module's weights for the pretrained ones, once; check everything that is going to be merged."""
        if self.part.max_drift is not None:
            try:
                require_gauge(getattr(pl_module, "backbone", None), trainer.world_size)
            except ValueError as error:
                raise MisconfigurationException(str(error)) from error
        if self.merger is None:  # at a second fit the module holds merged weights
            if not resumed:
                _require_unmerged(pl_module)
            self.merger, self.unsettled = self._make(pl_module), not resumed
        self._check_all()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule, restored: dict[str, Any] | None) -> None:
        """Take up a restored position, now that module and checkpoint are in place."""
        merger = require_started(self.merger)
        if restored is not None:
            try:
                merger.load_state_dict(restored, restored.get("accumulated") or self.part.target(pl_module))
            except CheckpointError as error:
                raise MisconfigurationException(f"this checkpoint cannot be resumed: {error}") from error
        stream = list(self.sources)
        if merger.tasks != stream[: len(merger.tasks)]:
            raise MisconfigurationException(
                f"the merged tasks are {', '.join(merger.tasks)}, but the stream starts with "
                f"{', '.join(stream[: len(merger.tasks)])}; resume with the same order."
            )
        self._write(pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before the first fold: refuse callbacks that wait for scores which nobody measures."""
        matrix = getattr(pl_module, "matrix", None)
        if isinstance(matrix, AccuracyMatrix):
            announce_scores(trainer, matrix.controls)
            refuse_unseen(trainer, measured=True)

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before an epoch: fold what is due."""
        self._settle(pl_module)
        merger, stream = require_started(self.merger), list(self.sources)
        while len(merger.tasks) <= min(trainer.current_epoch, len(stream) - 1):
            task = stream[len(merger.tasks)]
            report = merger.fold(self.sources[task], task)
            self._write(pl_module)
            self.on_fold(trainer, report)

    def begin_batch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before a batch: fold what is due, where the epoch's own hook was skipped."""
        self.begin(trainer, pl_module)

    def end_epoch(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Do nothing: the next model comes with the next epoch."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Do nothing: the module that is scored keeps its own matrix."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say so if the run ended early."""
        merged = len(require_started(self.merger).tasks)
        due = min(len(self.sources), trainer.max_epochs or len(self.sources))
        if merged < due and not trainer.fast_dev_run and not trainer.should_stop:  # type: ignore[attr-defined]
            raise MisconfigurationException(f"only {merged} of {due} tasks were merged; was the run limited?")

    def state_dict(self) -> dict[str, Any]:
        """Position, reports, settings and hashes.

        The merged weights are in the module's own state, as deployed; where that is a part of the accumulated vector,
        the whole is added here.
        """
        if self.merger is None:
            return {}
        state = self.merger.state_dict()
        whole = self.merger.scale == 1.0
        return state if whole else {**state, "accumulated": dict(self.merger.accumulated_parameters())}

    def _stream(self, trainer: L.Trainer) -> Sequence[str]:
        stream = getattr(getattr(trainer, "datamodule", None), "stream", None)
        if stream is not None:
            return list(stream)
        if isinstance(self.experts, Mapping):
            return list(self.experts)
        raise MisconfigurationException(
            "no order of tasks: use a StreamDataModule, or give `experts` as a mapping from task to model."
        )

    def _make(self, pl_module: L.LightningModule) -> ContinualMerger:
        part, target = self.part, self.part.target(pl_module)
        gauge = None if part.max_drift is None else gauge_of(getattr(pl_module, "backbone", None), target)
        try:
            refuse_computed(target, part.method, part.layers)
            return ContinualMerger(
                target,
                part.method,
                layers=part.layers,
                device=part.choose_device(pl_module),
                on_mismatch=part.on_mismatch,
                max_response=part.max_response,
                max_drift=part.max_drift,
                gauge=None if gauge is None else gauge.measure,
            )
        except ValueError as error:
            raise MisconfigurationException(f"the pretrained model cannot be merged into: {error}") from error

    def _settle(self, pl_module: L.LightningModule) -> None:
        """Before the first fold: take the weights again, if the module took up others when ``fit`` started."""
        merger = require_started(self.merger)
        if self.unsettled and not holds_exactly(self.part.target(pl_module), merger.pretrained):
            self.merger = self._make(pl_module)
            self.merger.processes, self.merger.progress = merger.processes, merger.progress
            self._check_all()
        self.unsettled = False

    def _check_all(self) -> None:
        merger, problems = require_started(self.merger), []
        for task, source in self.sources.items():
            if task in merger.tasks:
                continue
            try:
                merger.check(source, task)
            except CheckpointError as error:
                problems.append(f"task '{task}': {error}")
        if problems:
            raise MisconfigurationException("\n".join(problems))

    def _write(self, pl_module: L.LightningModule) -> None:
        """Copy the merged weights into the module's own parameters, which keep their identity."""
        merger = require_started(self.merger)
        parameters = dict(self.part.target(pl_module).state_dict(keep_vars=True))
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in merger.merged_parameters().items():
                parameters[name].copy_(tensor)
        if hasattr(pl_module, "merged_tasks"):
            setattr(pl_module, "merged_tasks", merger.tasks)  # noqa: B010  # any module may keep this list


def _require_unmerged(pl_module: L.LightningModule) -> None:
    """Refuse to take merged weights for the pretrained ones."""
    earlier: list[str] = getattr(pl_module, "merged_tasks", [])
    if earlier:
        raise MisconfigurationException(
            f"the module already holds a merge of {', '.join(earlier)}, so the pretrained weights are unknown; start "
            "from a fresh module and resume with `ckpt_path`."
        )
