"""The callback that folds the next fine-tuned model into the module at each task boundary."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from safemerge_pl.checkpoints import CheckpointError, Source
from safemerge_pl.experts import Experts, find_experts
from safemerge_pl.merger import ContinualMerger, FoldReport
from safemerge_pl.methods import MergeMethod, SafeMerge
from safemerge_pl.preflight import Mismatch

__all__ = ["MergeCallback"]


class MergeCallback(L.Callback):
    """Fold one model an epoch, before the epoch's validation, with any merge method.

    The module's weights at the start of ``fit`` are the pretrained ones. Only parameters that the method merges are
    changed, in place and wholly or not at all. The position in the stream is the callback's own and is saved with the
    checkpoint, so a run that was stopped continues where it was, bit-identical, and nothing is folded twice.
    ``validate``, ``test`` and ``predict`` fold nothing.

    Args:
        method: how to merge; SAFE-Merge with its defaults if left out.
        experts: where the fine-tuned models are: ``"zoo"``, a folder with one sub-folder a task, a path with ``{task}``
            in it, a list of such places (the first that has the task wins), or a mapping from task to model. A mapping
            also gives the order where the data module has no stream.
        layers: shell-style patterns of the parameters to merge, instead of the built-in choice.
        module_attr: dotted path of the sub-module that is merged; by default the tower that the module's backbone
            names, or the whole module.
        device: where the arithmetic runs, ``"auto"`` for the module's device.
        on_mismatch: ``"pretrained"`` also takes models of another image size or vocabulary, with the pretrained rows.

    Raises:
        MisconfigurationException: in ``setup``, for a strategy that shards weights, half-precision weights, or an
            expert that is missing or does not fit; all problems in one message, before anything is changed.
    """

    def __init__(
        self,
        method: MergeMethod | None = None,
        experts: str | list[str] | dict[str, str] = "zoo",
        layers: list[str] | None = None,
        module_attr: str | None = None,
        device: str = "auto",
        on_mismatch: Mismatch = "error",
    ) -> None:
        super().__init__()
        self.method = SafeMerge() if method is None else method
        self.experts: Experts = experts
        self.layers, self.module_attr, self.device = layers, module_attr, device
        self.on_mismatch: Mismatch = on_mismatch
        self.merger: ContinualMerger | None = None
        self.sources: dict[str, Source] = {}  # model of each task, in stream order
        self._restored: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        """Distinct for two callbacks that merge two parts of one module."""
        return self._generate_state_key(module_attr=self.module_attr)

    @classmethod
    def of(cls, trainer: L.Trainer) -> "MergeCallback | None":
        """The merge callback of a trainer, ``None`` if it has none."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return next((callback for callback in callbacks if isinstance(callback, MergeCallback)), None)

    @property
    def tasks(self) -> list[str]:
        """Names folded so far, in order."""
        return [] if self.merger is None else self.merger.tasks

    @property
    def reports(self) -> list[FoldReport]:
        """One report a fold."""
        return [] if self.merger is None else self.merger.reports

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Capture the pretrained weights and check everything that is going to be merged."""
        if stage != "fit":
            return
        _refuse_unsupported(trainer)
        pl_module.configure_model()
        self.sources = find_experts(self.experts, self._stream(trainer))
        if trainer.limit_train_batches == 0:
            raise MisconfigurationException("`limit_train_batches` is 0: no epoch would run and nothing be merged.")
        epochs = trainer.max_epochs
        if epochs is not None and not 0 <= epochs <= len(self.sources):
            raise MisconfigurationException(
                f"`max_epochs` is {epochs} but the stream has {len(self.sources)} tasks, one an epoch; set it to "
                f"{len(self.sources)}, or less to stop early."
            )
        if self.merger is None:  # captured once: at a second fit the module holds merged weights
            earlier: list[str] = getattr(pl_module, "merged_tasks", [])
            if earlier:
                raise MisconfigurationException(
                    f"the module already holds a merge of {', '.join(earlier)}, so the pretrained weights are "
                    "unknown; start from a fresh module and resume with `ckpt_path`."
                )
            target = self.target(pl_module)
            device = pl_module.device if self.device == "auto" else self.device
            try:
                self.merger = ContinualMerger(
                    target, self.method, layers=self.layers, device=device, on_mismatch=self.on_mismatch
                )
            except ValueError as error:
                raise MisconfigurationException(f"the pretrained model cannot be merged into: {error}") from error
        self._check_all()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take up a restored position, now that module and checkpoint are in place."""
        merger = self._require_merger()
        merger.device = torch.device(pl_module.device if self.device == "auto" else self.device)
        if self._restored is not None:
            try:
                merger.load_state_dict(self._restored, self.target(pl_module))
            except CheckpointError as error:
                raise MisconfigurationException(f"this checkpoint cannot be resumed: {error}") from error
            self._restored = None
        stream = list(self.sources)
        if merger.tasks != stream[: len(merger.tasks)]:
            raise MisconfigurationException(
                f"the merged tasks are {', '.join(merger.tasks)}, but the stream starts with "
                f"{', '.join(stream[: len(merger.tasks)])}; resume with the same order."
            )
        self._write(pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Fold what is due."""
        self._catch_up(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Fold what is due, if the epoch started from a checkpoint taken inside it (its start hook is skipped then)."""
        self._catch_up(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say so if the run ended early."""
        due = min(len(self.sources), trainer.max_epochs or len(self.sources))
        if len(self.tasks) < due and not trainer.fast_dev_run and not trainer.should_stop:  # type: ignore[attr-defined]
            raise MisconfigurationException(f"only {len(self.tasks)} of {due} tasks were merged; was the run limited?")

    def state_dict(self) -> dict[str, Any]:
        """Position, reports, settings and hashes; the merged weights are in the module's own state."""
        if self.merger is None:
            return self._restored or {}
        return self.merger.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until ``fit`` starts; other stages have no use for it."""
        self._restored = state_dict or None

    def target(self, pl_module: L.LightningModule) -> nn.Module:
        """The sub-module that is merged."""
        path = self.module_attr
        if path is None:
            backbone = getattr(pl_module, "backbone", None)
            name = getattr(backbone, "merged_attr", None)
            path = f"backbone.{name}" if name else ""
        try:
            target = operator.attrgetter(path)(pl_module) if path else pl_module
        except AttributeError as error:
            raise MisconfigurationException(
                f"`module_attr` '{path}' does not exist in {type(pl_module).__name__}: {error}."
            ) from error
        if not isinstance(target, nn.Module):
            raise MisconfigurationException(f"`module_attr` '{path}' is a {type(target).__name__}, not a module.")
        return target

    def _stream(self, trainer: L.Trainer) -> Sequence[str]:
        stream = getattr(getattr(trainer, "datamodule", None), "stream", None)
        if stream is not None:
            return list(stream)
        if isinstance(self.experts, Mapping):
            return list(self.experts)
        raise MisconfigurationException(
            "no order of tasks: use a StreamDataModule, or give `experts` as a mapping from task to model."
        )

    def _check_all(self) -> None:
        merger, problems = self._require_merger(), []
        for task, source in self.sources.items():
            if task in merger.tasks:
                continue
            try:
                merger.check(source, task)
            except CheckpointError as error:
                problems.append(f"task '{task}': {error}")
        if problems:
            raise MisconfigurationException("\n".join(problems))

    def _catch_up(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        merger, stream = self._require_merger(), list(self.sources)
        while len(merger.tasks) <= min(trainer.current_epoch, len(stream) - 1):
            task = stream[len(merger.tasks)]
            report = merger.fold(self.sources[task], task)
            self._write(pl_module)
            self._log(trainer, report)

    def _write(self, pl_module: L.LightningModule) -> None:
        """Copy the merged weights into the module's own parameters, which keep their identity."""
        merger = self._require_merger()
        parameters = dict(self.target(pl_module).state_dict(keep_vars=True))
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in merger.merged_parameters().items():
                parameters[name].copy_(tensor)
        if hasattr(pl_module, "merged_tasks"):
            setattr(pl_module, "merged_tasks", merger.tasks)  # noqa: B010  # any module may keep this list

    def _log(self, trainer: L.Trainer, report: FoldReport) -> None:
        scalars = {"merge/kept_fraction": report.kept_fraction, "merge/seconds": report.seconds}
        scalars["merge/task_norm"] = sum(row.task_norm**2 for row in report.layers) ** 0.5
        scalars["merge/update_norm"] = sum(row.update_norm**2 for row in report.layers) ** 0.5
        if report.losses:
            scalars |= {"merge/loss_first": report.losses[0], "merge/loss_last": report.losses[-1]}
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=report.index)
            for step, loss in enumerate(report.losses):
                logger.log_metrics({f"recovery/{report.index:02d}_{report.task}": loss}, step=step)

    def _require_merger(self) -> ContinualMerger:
        if self.merger is None:
            raise RuntimeError("the merge has not started: `setup` was not called for stage 'fit'.")
        return self.merger


def _refuse_unsupported(trainer: L.Trainer) -> None:
    name = type(trainer.strategy).__name__
    if any(word in name for word in ("FSDP", "DeepSpeed", "ModelParallel")):
        raise MisconfigurationException(
            f"{name} splits each weight among processes, and a merge needs whole matrices; use a single device or DDP."
        )
    if str(trainer.precision) in ("16-true", "bf16-true", "transformer-engine", "transformer-engine-float16"):
        raise MisconfigurationException(
            f"precision '{trainer.precision}' keeps the merged weights in half precision, where small updates vanish; "
            "use '32-true' or a '-mixed' precision."
        )
