"""Scores of the stream among the trainer's callback metrics, where ``ModelCheckpoint`` and others look for them."""

from collections.abc import Collection, Mapping
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.functional import SCORES
from safemerge_pl.scoring.tags import tag_scores

__all__ = ["announce_scores", "publish_scores", "refuse_unseen"]


def announce_scores(trainer: L.Trainer, controls: Collection[str]) -> None:
    """Enter the scores that a run measures as NaN: it knows them, and the weights in training have none.

    A ``ModelCheckpoint`` that monitors one takes NaN for the worst value, and would stop a run that has no such metric.

    Args:
        trainer: of the run.
        controls: names of the control sets; without them neither Gen. nor H is defined.
    """
    names = [name for name in SCORES if controls or name not in ("Gen", "H")]
    publish_scores(trainer, dict.fromkeys(names, float("nan")))


def publish_scores(trainer: L.Trainer, scores: Mapping[str, float]) -> None:
    """Enter the scores of the weights that the module holds from now on.

    Args:
        trainer: of the run.
        scores: shares in [0, 1]; accuracies by set may be among them and are left out.
    """
    found = {name: scores[name] for name in SCORES if name in scores}
    tags = tag_scores(found, (), ())
    trainer.callback_metrics.update({tag: torch.tensor(value) for tag, value in tags.items()})


def refuse_unseen(trainer: L.Trainer, *, measured: bool, never: str = "") -> None:
    """Refuse callbacks that monitor a score of the stream which this run never shows them.

    Args:
        trainer: of the run; its scores are announced.
        measured: whether accuracies are measured at all.
        never: why a callback would never see the scores, if so.

    Raises:
        MisconfigurationException: naming callback, score and remedy.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if not isinstance(monitor, str) or not monitor.startswith("stream/"):
            continue
        name = monitor.removeprefix("stream/")
        if name not in SCORES:
            why = f"the scores of a stream are {', '.join(f'stream/{score}' for score in SCORES)}"
        elif not measured:
            why = "nothing is scored; give the merge callback `metric` or `score`"
        elif monitor not in trainer.callback_metrics:
            why = f"{name} is not defined without control sets; name some with `controls`"
        else:
            why = never
        if why:
            raise MisconfigurationException(f"{type(callback).__name__} monitors '{monitor}', but {why}.")
