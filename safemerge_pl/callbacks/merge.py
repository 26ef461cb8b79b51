"""The callback that folds the next fine-tuned model into the module at each task boundary."""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import Unpack

from safemerge_pl.callbacks.closing import describe_stream, last_row, print_table
from safemerge_pl.callbacks.from_files import FromFiles
from safemerge_pl.callbacks.guards import refuse_unsupported
from safemerge_pl.callbacks.live import Live
from safemerge_pl.callbacks.monitoring import publish_scores
from safemerge_pl.callbacks.options import LiveOptions
from safemerge_pl.callbacks.part import MergePart, require_started
from safemerge_pl.callbacks.scalars import log_fold
from safemerge_pl.callbacks.starting import StartingWeights, refuse_foreign
from safemerge_pl.checkpoints.adapter_modules import plain_name
from safemerge_pl.checkpoints.differences import Mismatch
from safemerge_pl.checkpoints.open import Source
from safemerge_pl.data.experts import Experts
from safemerge_pl.folding.bound import MaxResponse
from safemerge_pl.folding.processes import Processes
from safemerge_pl.live import LiveMerger
from safemerge_pl.merger import ContinualMerger, FoldReport
from safemerge_pl.methods import MergeMethod, SafeMerge
from safemerge_pl.runtime.names import refuse_unknown
from safemerge_pl.scoring.tags import tag_scores

__all__ = ["MergeCallback"]


class MergeCallback(L.Callback):
    """Fold one model after another into the module, with any merge method.

    The models come from checkpoints, one per epoch (``experts``), or from the training itself: with ``epochs_per_task``
    or ``boundary`` the callback folds what a training loop has just trained, at the end of each task.

    The weights that training starts from are the pretrained ones, also where the module reads them in ``setup``,
    ``configure_model`` or ``on_fit_start``. Weights are changed in place, wholly or not at all. The position in the
    stream is the callback's own and is saved with the checkpoint, so a run that was stopped continues where it was,
    bit-identical, and nothing is folded twice. ``validate``, ``test`` and ``predict`` fold nothing.

    From checkpoints, a model is folded at the start of an epoch, and the epoch's validation scores the merge.

    In training, a task is folded after its last optimiser step. The merged weights are then in the module for that
    boundary's validation and checkpoints; before the next batch the pretrained weights return, with a fresh optimiser
    and scheduler. Validations and checkpoints inside a task see the weights in training. Parameters outside of
    ``module_attr`` (a classification head) are trained on as they are.

    Args:
        method: how to merge; SAFE-Merge with its defaults if left out.
        experts: where the fine-tuned models are: ``"zoo"``, a folder with one sub-folder per task, a path with
            ``{task}`` in it, a list of such places (the first that has the task wins), or a mapping from task to model.
            A mapping also gives the order where the data module has no stream.
        layers: shell-style patterns of the parameters to merge, instead of the built-in choice.
        module_attr: dotted path of the sub-module that is merged; by default the tower that the module's backbone
            names, or the whole module.
        device: where the arithmetic runs, ``"auto"`` for the module's device.
        on_mismatch: ``"pretrained"`` also takes models of another image size or vocabulary, with the pretrained rows.
        max_response: bounds how strongly the pretrained matrices read what is merged, and so protects what the
            pretrained model knows; 0.015 is a careful value, 0.035 a fair one. ``"auto"`` takes the method's own,
            ``None`` bounds nothing.
        max_drift: bounds how far the model's features of noise move, which tells what general knowledge was lost
            whatever was merged; 0.01 is a careful value. For streams of checkpoints on one process.
        **live: merge what the loop trains, see :class:`LiveOptions`.

    Raises:
        ValueError: if the options contradict each other, or there is none of a name.
        MisconfigurationException: before the first step, for a strategy that shards weights, half-precision weights,
            or an expert that is missing or does not fit; all problems in one message, before anything is changed.
    """

    def __init__(
        self,
        method: MergeMethod | None = None,
        experts: str | list[str] | dict[str, str] = "zoo",
        layers: list[str] | str | None = None,
        module_attr: str | None = None,
        device: str = "auto",
        on_mismatch: Mismatch = "error",
        max_response: MaxResponse = "auto",
        max_drift: float | None = None,
        **live: Unpack[LiveOptions],
    ) -> None:
        super().__init__()
        refuse_unknown(live, _options_of(type(self)), f"{type(self).__name__} has no option")
        method = SafeMerge() if method is None else method
        self.part = MergePart(method, layers, module_attr, device, on_mismatch, max_response, max_drift)
        self._restored: dict[str, Any] | None = None
        self._starting = StartingWeights(self.part)
        self._is_ready, self._steps = False, 0
        if live and experts != "zoo":
            raise ValueError("give `experts` (checkpoints) or `epochs_per_task`/`boundary` (training), not both.")
        if live and max_drift is not None:
            raise ValueError("`max_drift` is for streams of checkpoints; in a training loop bound by `max_response`.")
        self.files = FromFiles(self.part, experts, on_fold=log_fold)
        self.live = Live(self.part, live, on_fold=log_fold, on_scores=self.log_scores) if live else None
        self._mode: FromFiles | Live = self.live or self.files

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
    def merger(self) -> ContinualMerger | LiveMerger | None:
        """The merge itself, ``None`` before ``fit``."""
        return self._mode.merger

    @property
    def method(self) -> MergeMethod:
        """How to merge."""
        return self.part.method

    @property
    def layers(self) -> Sequence[str] | None:
        """Patterns of the parameters to merge."""
        return self.part.layers

    @property
    def module_attr(self) -> str | None:
        """Dotted path of the sub-module that is merged."""
        return self.part.module_attr

    @property
    def device(self) -> str:
        """Where the arithmetic runs."""
        return self.part.device

    @property
    def on_mismatch(self) -> Mismatch:
        """What to do with a model of another image size or vocabulary."""
        return self.part.on_mismatch

    @property
    def experts(self) -> Experts:
        """Where the fine-tuned models are."""
        return self.files.experts

    @experts.setter
    def experts(self, experts: Experts) -> None:
        self.files.experts = experts

    @property
    def tasks(self) -> list[str]:
        """Names folded so far, in order."""
        return [] if self.merger is None else self.merger.tasks

    @property
    def sources(self) -> dict[str, Source]:
        """Checkpoint of each task, in stream order; empty in training."""
        return self.files.sources

    @property
    def reports(self) -> list[FoldReport]:
        """One report per fold."""
        return [] if self.merger is None else self.merger.reports

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a run that cannot work. The module is set up after its callbacks, so its weights are still unknown."""
        if stage == "fit":
            self._is_ready = False
            refuse_unsupported(trainer)
            self._mode.setup(trainer, pl_module, known=self._starting.known(pl_module))
        if self.merger is None:
            self._starting.watch(pl_module)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note that what the module holds now is a checkpoint's, and of which merge."""
        self._starting.loaded(pl_module)
        state = checkpoint.get("callbacks", {}).get(self.state_key, {})
        tasks = state.get("live", {}).get("merger", state).get("tasks", [])
        if tasks and trainer.state.fn != TrainerFn.FITTING:
            setattr(pl_module, "merged_tasks", list(tasks))  # noqa: B010  # whoever captures it next must know

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the pretrained weights and a restored position, now that module and checkpoint are in place."""
        self.ready(trainer, pl_module)

    def ready(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Do what :meth:`on_fit_start` does, once; for callbacks that need the merger and come first."""
        if self._is_ready:
            return
        restored, self._restored = self._restored, None
        if restored is not None and ("live" in restored) != (self.live is not None):
            kind = "checkpoints (`experts`)" if self.live is not None else "what a loop trains (`epochs_per_task`)"
            raise MisconfigurationException(f"this checkpoint is from a merge of {kind}; build the callback as then.")
        resumed = restored is not None
        with self._starting.in_place(pl_module) if resumed else nullcontext():
            self._mode.capture(trainer, pl_module, resumed=resumed)
        self._starting.forget()
        merger = self._require_merger()
        merger.device = self.part.choose_device(pl_module)
        merger.processes = Processes(shared=trainer.world_size > 1)
        self._require_own_weights(trainer, pl_module)
        self._mode.on_fit_start(trainer, pl_module, restored)
        self._is_ready, self._steps = True, trainer.global_step  # those of a checkpoint are not restored yet

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a foreign checkpoint, and in training loaders that cannot work, now that they are known."""
        if self._mode.unsettled:
            refuse_foreign(trainer, self._steps)
        self._mode.on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Fold what is due from a checkpoint; in training, begin the next task."""
        self._mode.begin(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Fold what is due, if the epoch started from a checkpoint taken inside it (its start hook is skipped then)."""
        self._mode.begin_batch(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """In training, fold after a task's last batch: its optimiser step is done, its validation still to come."""
        if trainer.is_last_batch:
            self._mode.end_epoch(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """In training, enter the accuracies of a boundary."""
        if not trainer.sanity_checking and trainer.state.fn == TrainerFn.FITTING:
            self._mode.on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """In training, close an epoch that no last batch has closed: it was skipped, or the loader ended early.

        An epoch that ``max_steps`` or a stop signal cuts off is not over; Lightning would go on with it.
        """
        if trainer.is_last_batch or not trainer.fit_loop.epoch_loop.done:
            self._mode.end_epoch(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say so if the run ended early; in training, fold the last task where only now it is known to be over."""
        self._mode.on_train_end(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the closing table, if the merge was scored and there is a progress bar, now that all else is done."""
        quiet = trainer.progress_bar_callback is None or trainer.fast_dev_run  # type: ignore[attr-defined]
        if quiet or not trainer.is_global_zero or self.merger is None or MergeCallback.of(trainer) is not self:
            return
        row = last_row(trainer, pl_module, self.merger, self.live)
        if row:
            print_table(describe_stream(trainer, self.method, self.merger, self.live), row, len(self.tasks))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave a merger that works without the run's processes, and forget a state that no ``fit`` took up."""
        self._restored = None
        self._starting.stop()
        if self.merger is not None:
            self.merger.processes = Processes(shared=False)

    def state_dict(self) -> dict[str, Any]:
        """Position, reports, settings and hashes, as plain values.

        From checkpoints, the merged weights are in the module's own state; in training they are added here.
        """
        return self._mode.state_dict() or self._restored or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until ``fit`` starts; other stages have no use for it."""
        self._restored = state_dict or None

    def target(self, pl_module: L.LightningModule) -> nn.Module:
        """The sub-module that is merged."""
        return self.part.target(pl_module)

    def _require_own_weights(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Two callbacks must not merge the same weights."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        mine = {id(tensor) for tensor in self._merged_tensors(pl_module)}
        for other in callbacks:
            if isinstance(other, MergeCallback) and other is not self and other.merger is not None:
                shared = sum(id(tensor) in mine for tensor in other._merged_tensors(pl_module))
                if shared:
                    raise MisconfigurationException(
                        f"two merge callbacks share {shared} parameters; give each its own `module_attr` or `layers`."
                    )

    def _require_merger(self) -> ContinualMerger | LiveMerger:
        require_started(self.merger)
        assert self.merger is not None
        return self.merger

    def _merged_tensors(self, pl_module: L.LightningModule) -> list[Tensor]:
        merger = self._require_merger()
        tensors = {plain_name(n): t for n, t in self.target(pl_module).state_dict(keep_vars=True).items()}
        return [tensors[name] for name in merger.merged_parameters()]

    def log_scores(
        self, trainer: L.Trainer, pl_module: L.LightningModule, scores: dict[str, float], controls: Sequence[str]
    ) -> None:
        """Log accuracies of the merged weights over the number of merged tasks, and tell other callbacks.

        ACC, Gen, H and BWT are then in ``trainer.callback_metrics`` as ``stream/ACC`` and so on. A callback with a
        method ``on_merge_scored(trainer, pl_module, merge, scores)`` gets them.
        """
        for logger in trainer.loggers:
            logger.log_metrics(tag_scores(scores, self.tasks, controls), step=len(self.tasks))
        publish_scores(trainer, scores)
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if hasattr(callback, "on_merge_scored"):
                callback.on_merge_scored(trainer, pl_module, self, scores)


def _options_of(kind: type[MergeCallback]) -> list[str]:
    """Names of everything that a callback can be given: its own options, and those for merging in a loop."""
    own = [
        parameter.name
        for base in kind.__mro__
        if issubclass(base, MergeCallback) and "__init__" in vars(base)
        for parameter in inspect.signature(base.__init__).parameters.values()
        if parameter.name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return list(dict.fromkeys([*own, *LiveOptions.__annotations__]))
