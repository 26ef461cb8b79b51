"""Checks that refuse unsupported trainers and plans before training starts."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from safemerge_pl.callbacks.options import LiveOptions
from safemerge_pl.live import LiveMerger
from safemerge_pl.module import ContinualMergeModule

__all__ = [
    "check_plan",
    "refuse_unsupported",
    "refuse_untrained",
    "require_same",
    "require_untrained",
    "require_validation",
    "say_what_is_merged",
    "several_tasks",
]

_AVERAGES = ("StochasticWeightAveraging", "WeightAveraging", "EMA", "EMACallback", "ModelEMA", "WeightEMA")
"""Callbacks that keep averaged weights: Lightning's own, and what others call theirs."""


def _is_a(callback: Any, *names: str) -> bool:
    """By name, since `lightning.pytorch` and `pytorch_lightning` each have their own classes."""
    return any(kind.__name__ in names for kind in type(callback).__mro__)


def refuse_unsupported(trainer: L.Trainer) -> None:
    """Refuse strategies that split weights, half-precision weights, and callbacks that write weights of their own.

    Raises:
        MisconfigurationException: naming the option and the remedy.
    """
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
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if _is_a(callback, *_AVERAGES):
            raise MisconfigurationException(
                f"{type(callback).__name__} keeps an average of the weights over all tasks and writes it over the "
                "merged ones; remove it, or average inside a task in your module."
            )
        if _is_a(callback, "ModelPruning"):
            raise MisconfigurationException(
                f"{type(callback).__name__} computes weights from others and a mask, and merged weights could not be "
                "written there; remove it, and prune the merged model instead."
            )


def check_plan(trainer: L.Trainer, options: LiveOptions, left: int | None, begun: int) -> None:
    """Refuse a training plan in which tasks and epochs do not fit together.

    Args:
        trainer: about to fit.
        options: of the live merge.
        left: named tasks that are still to come, ``None`` if they have no names.
        begun: epochs of the task in progress that are over.

    Raises:
        MisconfigurationException: naming the option and the remedy.
    """
    boundary, each = options.get("boundary"), options.get("epochs_per_task")
    if trainer.limit_train_batches == 0:
        raise MisconfigurationException("`limit_train_batches` is 0: nothing would be trained and nothing merged.")
    epochs, over = trainer.max_epochs, trainer.current_epoch
    if epochs is not None and 0 <= epochs <= over:
        raise MisconfigurationException(
            f"this Trainer has run its {epochs} epochs, so `fit` would do nothing; make a new Trainer for each task, "
            "or raise `trainer.fit_loop.max_epochs`."
        )
    if left is not None and left < 1:
        raise MisconfigurationException("all named tasks are merged; name more `tasks`, or train without the callback.")
    _check_early_stopping(trainer, boundary)
    _check_finetuning(trainer, several_tasks(trainer, options, begun))
    if "metric" in options and trainer.limit_val_batches == 0:
        raise MisconfigurationException(
            "`limit_val_batches` is 0: there would be no validation, and `metric` would have no value; use `score`."
        )
    if isinstance(boundary, str) and boundary != "fit":
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not hasattr(data, boundary):
            raise MisconfigurationException(
                f"`boundary` '{boundary}' must be 'fit' or an attribute of the data module that tells the current "
                f"task, and {type(data).__name__ if data is not None else 'no data module'} has none of that name."
            )
    if each is None or epochs is None or epochs < 0 or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    coming = epochs - over + begun
    if coming < each:
        raise MisconfigurationException(
            f"`max_epochs` is {epochs}: the run would end before its first task of {each} epochs is complete; raise "
            "it, or lower `epochs_per_task`."
        )
    if coming % each:
        raise MisconfigurationException(
            f"`max_epochs` is {epochs}, which is no multiple of {each} epochs a task: the last {coming % each} epochs "
            f"would never be merged; set it to {epochs - coming % each} or {epochs - coming % each + each}."
        )
    if left is not None and coming // each > left:
        raise MisconfigurationException(
            f"`max_epochs` is {epochs}, which is {coming // each} tasks of {each} epochs, but {left} are named and "
            f"left to train; set it to {over - begun + each * left}, or name more `tasks`."
        )
    every = trainer.check_val_every_n_epoch
    if "metric" in options and every and each % every:
        raise MisconfigurationException(
            f"`check_val_every_n_epoch` is {every}: there would be no validation at the end of every task of {each} "
            "epochs, and `metric` would have no value; make it a divisor, or use `score`."
        )


def _check_early_stopping(trainer: L.Trainer, boundary: Any) -> None:
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for found in callbacks:
        if not _is_a(found, "EarlyStopping"):
            continue
        stopper: Any = found
        if boundary != "fit":
            raise MisconfigurationException(
                "EarlyStopping ends the whole run, not the task, and compares tasks with each other; run one `fit` a "
                "task with `boundary='fit'`."
            )
        if stopper.wait_count or torch.isfinite(stopper.best_score):
            raise MisconfigurationException(
                "EarlyStopping still remembers the best score of the task before; make a new one (and a new Trainer) "
                "for each `fit`."
            )


def several_tasks(trainer: L.Trainer, options: LiveOptions, begun: int) -> bool:
    """Whether this `fit` may train more than one task.

    Args:
        trainer: about to fit.
        options: of the live merge.
        begun: epochs of the task in progress that are over.
    """
    if options.get("boundary") == "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return False
    epochs = trainer.max_epochs
    if epochs is None or epochs < 0:
        return True
    return epochs - trainer.current_epoch + begun > options.get("epochs_per_task", 1)


def _check_finetuning(trainer: L.Trainer, several: bool) -> None:
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if several and _is_a(callback, "BackboneFinetuning"):
            raise MisconfigurationException(
                f"{type(callback).__name__} counts the epochs of the whole run: it would freeze the backbone in the "
                "first task only, and then set the learning rate of everything; run one `fit` a task with "
                "`boundary='fit'` and a new one each time."
            )


def require_validation(trainer: L.Trainer, options: LiveOptions) -> None:
    """Refuse a `metric` in a run that has no validation, once its loaders are known.

    Raises:
        MisconfigurationException: naming the way out.
    """
    if "metric" in options and not trainer.enable_validation:
        raise MisconfigurationException(
            "this run has no validation (no `validation_step`, or no validation loader), and `metric` would have no "
            "value; use `score`."
        )


def refuse_untrained(pl_module: L.LightningModule) -> None:
    """Refuse the module of the checkpoint stream, which trains nothing.

    Raises:
        MisconfigurationException: always for such a module.
    """
    if isinstance(pl_module, ContinualMergeModule):
        raise MisconfigurationException(
            "ContinualMergeModule trains nothing, so there is nothing to merge at a boundary; use a LightningModule "
            "that trains, or give `experts` instead of `epochs_per_task` and `boundary`."
        )


def require_untrained(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Refuse to take weights for the pretrained ones that have been trained or merged already.

    Raises:
        MisconfigurationException: telling how to pass the pretrained weights.
    """
    earlier: list[str] = getattr(pl_module, "merged_tasks", [])
    trained = f"it holds a merge of {', '.join(earlier)}" if earlier else ""
    if not earlier and trainer.global_step:
        trained = f"this Trainer has trained it for {trainer.global_step} steps"
    if trained:
        raise MisconfigurationException(
            f"the module's weights are not the pretrained ones any more: {trained}. Use the same callback again, or "
            "give the pretrained weights with `pretrained=` (folder, file or hub id)."
        )


def require_same(trainer: L.Trainer, task: str, hashes: Sequence[str]) -> None:
    """See that all processes trained and merged the same weights.

    Raises:
        RuntimeError: on every process, if they did not.
    """
    if trainer.world_size < 2:
        return
    found: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(found, tuple(hashes))
    if len(set(found)) > 1:
        raise RuntimeError(
            f"task '{task}': the processes hold different weights after training, so they were not trained together; "
            "use the strategy 'ddp' and change weights on all processes alike."
        )


def say_what_is_merged(merger: LiveMerger, path: str | None, whole: str) -> None:
    """Tell what is merged and what becomes of the rest; warn of a head whose training would be undone.

    Args:
        merger: of the part that is merged.
        path: ``module_attr``, ``None`` if none was named.
        whole: class of the whole module.
    """
    names = merger.merged_parameters()
    others = len(merger.pretrained) - len(names)
    fate = "put back at each boundary" if merger.rest == "pretrained" else "kept as trained"
    rank_zero_info(
        f"{merger.method.label}: {len(names)} parameters of `{path or whole}` are merged at each boundary, {others} "
        f"others of it are {fate}; everything outside of it is left alone."
    )
    tops = {name.partition(".")[0] for name in names}
    lost = [
        name
        for name, part in merger.module.named_children()
        if name not in tops and any(parameter.requires_grad for parameter in part.parameters())
    ]
    if path is None and merger.rest == "pretrained" and lost:
        rank_zero_warn(
            f"`{lost[0]}` holds nothing that is merged, and its training is undone at each boundary; name the part "
            "to merge with `module_attr` and what is outside of it (such as heads) is left alone."
        )
