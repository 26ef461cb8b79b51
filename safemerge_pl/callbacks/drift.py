"""Measure after each merge how far the model has moved, without data."""

from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn

from safemerge_pl.callbacks.merge import MergeCallback
from safemerge_pl.scoring.drift import DriftGauge, gauge_of

__all__ = ["DriftMonitor"]


class DriftMonitor(L.Callback):
    """Measure after each merge of a stream of checkpoints how far the model's features of noise have moved.

    The drift tells without any data what general knowledge a merge has cost, see
    :class:`~safemerge_pl.scoring.DriftGauge`. It stands as ``merge/drift`` in the loggers and in
    ``trainer.callback_metrics``, where ``EarlyStopping`` can watch it, in the closing table and in the report.

    Args:
        count: inputs of noise.

    Raises:
        ValueError: if ``count`` is not at least 1.
    """

    def __init__(self, count: int = 256) -> None:
        super().__init__()
        if count < 1:
            raise ValueError(f"`count` must be at least 1, got {count}.")
        self.count = count
        self.drifts: list[float] = []
        self._gauge: DriftGauge | None = None

    @classmethod
    def of(cls, trainer: L.Trainer) -> "DriftMonitor | None":
        """The monitor of a trainer, ``None`` if it has none."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return next((callback for callback in callbacks if isinstance(callback, DriftMonitor)), None)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the pretrained model, before anything is merged.

        Raises:
            MisconfigurationException: where nobody knows how to give the model noise.
        """
        merge = MergeCallback.of(trainer)
        if merge is None:
            raise MisconfigurationException("DriftMonitor has nothing to look at: the trainer has no MergeCallback.")
        if merge.live is not None:
            raise MisconfigurationException(
                "DriftMonitor is for streams of checkpoints; in a training loop measure what you like with "
                "`safemerge_pl.scoring.DriftGauge`."
            )
        merge.ready(trainer, pl_module)
        assert merge.merger is not None
        backbone, pretrained = getattr(pl_module, "backbone", None), merge.merger.pretrained
        self._gauge = gauge_of(backbone, merge.target(pl_module), pretrained, self.count)  # a resumed run holds a merge
        if self._gauge is None:
            raise MisconfigurationException(
                "DriftMonitor does not know what noise this model takes: give your backbone a method `noise`, or "
                "measure it with `safemerge_pl.scoring.DriftGauge` in your own loop."
            )

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the merge that is about to be scored."""
        merge = MergeCallback.of(trainer)
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or merge is None or not merge.tasks:
            return
        assert self._gauge is not None
        known = merge.reports[-1].drift  # where `max_drift` bounds it, and logged then
        drift = self._gauge.measure() if known is None else known
        self.drifts = [*self.drifts[: len(merge.tasks) - 1], drift]
        trainer.callback_metrics["merge/drift"] = torch.tensor(drift)
        for logger in trainer.loggers if known is None else ():
            logger.log_metrics({"merge/drift": drift}, step=len(merge.tasks))

    def measure(self) -> float:
        """Measure the drift of the weights that the module holds now."""
        assert self._gauge is not None, "`fit` has not started"
        return self._gauge.measure()

    def state_dict(self) -> dict[str, Any]:
        """What was measured, as plain values."""
        return {"drifts": self.drifts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what an earlier run measured."""
        self.drifts = [float(drift) for drift in state_dict["drifts"]]
