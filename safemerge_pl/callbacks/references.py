"""The two rows that every merge is compared with: the pretrained model and the experts on their own."""

from typing import Any, ClassVar

import lightning as L

from safemerge_pl.callbacks.merge import MergeCallback
from safemerge_pl.callbacks.progress import show_scoring
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.functional import SCORES
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.scoring.rows import Row, measure_references, sets_to_score
from safemerge_pl.scoring.tags import tag_scores

__all__ = ["ReferenceRows"]


class ReferenceRows(L.Callback):
    """Score the pretrained model and every expert before the first merge.

    *Pre-trained* is the zero-shot model on all tasks and control sets. *Individual* is each expert on its own task, and
    the mean over the experts of their control accuracies. The rows are saved in checkpoints, so a resumed
    run does not measure them again. Loggers get the pretrained model's scores as step 0 of the stream.

    Args:
        enabled: measure the rows at all.
        individual: measure the experts too; costs one pass over the control sets for each.
        assert_scores: stop where a score is further from the published one, as the data knows it, than this; a share,
            0.01 is one point.
    """

    heading: ClassVar[str] = "references"
    """Where the rows stand in reports."""

    def __init__(self, enabled: bool = True, individual: bool = True, assert_scores: float | None = None) -> None:
        super().__init__()
        self.enabled, self.individual, self.assert_scores = enabled, individual, assert_scores
        self.rows: dict[str, dict[str, Any]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure what is missing."""
        merge = MergeCallback.of(trainer)
        if not self.enabled or merge is None or merge.merger is None:
            return
        scorer = pl_module.scorer if isinstance(pl_module, ContinualMergeModule) else None
        if scorer is None:
            return
        wanted = ("pretrained", "individual") if self.individual else ("pretrained",)
        what = "pretrained model and experts" if self.individual else "pretrained model"
        with show_scoring(trainer, scorer, sets_to_score(scorer.data, merge.sources, self.rows, wanted), what):
            measure_references(
                scorer,
                merge.target(pl_module),
                merge.sources,
                self.rows,
                wanted=wanted,
                pretrained=merge.merger.pretrained,
                within=self.assert_scores,
                on_row=lambda what, row: _say(trainer, what, row),
            )
        _log_start(trainer, self.rows["pretrained"], scorer.data)

    def state_dict(self) -> dict[str, Any]:
        """The rows, as plain values."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the rows of an earlier run."""
        self.rows = dict(state_dict["rows"])


def _log_start(trainer: L.Trainer, row: Row, data: StreamDataModule) -> None:
    """Log the pretrained model as step 0; after a resume too, for the logger may have begun anew."""
    scores = {**row["accuracies"], **{key: row[key] for key in SCORES if key in row}}
    for logger in trainer.loggers:
        logger.log_metrics(tag_scores(scores, list(data.stream), data.controls), step=0)


def _say(trainer: L.Trainer, what: str, row: dict[str, Any]) -> None:
    """Print one line per model, if there is a progress bar to print it."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        parts = [f"{key} {100 * row[key]:.1f}" for key in ("acc", *SCORES) if key in row]
        bar.print(f"  {what:<28} {'  '.join(parts)}")
