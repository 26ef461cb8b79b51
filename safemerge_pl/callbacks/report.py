"""Write what a stream measured: after every merge, and finished at the end."""

import os
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn

from safemerge_pl.callbacks.board import finish_board, log_layout, log_matrix
from safemerge_pl.callbacks.closing import describe_stream, last_drift
from safemerge_pl.callbacks.merge import MergeCallback
from safemerge_pl.functional import SCORES
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.reports.stream import Report, matrix_figure, stream_figure
from safemerge_pl.reports.tables import markdown
from safemerge_pl.runtime.configs import config_folder
from safemerge_pl.runtime.environment import environment
from safemerge_pl.runtime.files import local_path, write_figure, write_json, write_text
from safemerge_pl.runtime.memory import peak_memory_mib

__all__ = ["StreamReport", "run_folder"]


class StreamReport(L.Callback):
    """Keep ``report.json`` up to date, and at the end write ``report.md``, ``matrix.png`` and ``stream.png``.

    TensorBoard gets the accuracy matrix as a heat map after every merge, charts of all scores and of all tasks under
    CUSTOM SCALARS, and at the end the report as text and the scores by settings under HPARAMS. The steps are saved in
    checkpoints, so a resumed run reports the whole stream.

    Args:
        enabled: report at all.
        folder: where to; the logger's folder of this run if left out.
        figures: draw the two figures.
    """

    def __init__(self, enabled: bool = True, folder: str | None = None, figures: bool = True) -> None:
        super().__init__()
        self.enabled, self.folder, self.figures = enabled, folder, figures
        self.steps: list[dict[str, Any]] = []
        self._start = self._scoring = time.perf_counter()
        self._laid_out = False
        self._earlier = 0.0  # seconds of the runs that this one resumes

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start the clock."""
        self._start, self._laid_out = time.perf_counter(), False

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock of one evaluation."""
        self._scoring = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the row of this merge."""
        merge = MergeCallback.of(trainer)
        if merge is None or trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if not self._writes(trainer) or not isinstance(pl_module, ContinualMergeModule):
            return
        self._add(trainer, merge, pl_module.last_scores)

    def on_merge_scored(
        self, trainer: L.Trainer, pl_module: L.LightningModule, merge: MergeCallback, scores: dict[str, float]
    ) -> None:
        """Add the row of a merge in somebody's training loop, and bring every file up to date."""
        if merge is MergeCallback.of(trainer) and self._writes(trainer):
            self._add(trainer, merge, scores)
            self._finish(trainer, self.content(trainer))

    def _add(self, trainer: L.Trainer, merge: MergeCallback, scores: dict[str, float]) -> None:
        fold, scoring = merge.reports[-1], None if merge.live is None else merge.live.scores.seconds
        drift = last_drift(trainer, fold)
        columns: dict[str, Any] = {key: scores[key] for key in SCORES if key in scores}
        row: dict[str, Any] = {
            "step": fold.index,
            "task": fold.task,
            **columns,
            "accuracies": {key: value for key, value in scores.items() if key not in SCORES},
            "kept_fraction": fold.kept_fraction,
            **({} if fold.response is None else {"response": fold.response, "scale": fold.scale}),
            **({} if drift is None else {"drift": drift}),
            **({"shares": [asdict(group) for group in fold.shares]} if fold.shares else {}),
            **({} if fold.leading is None else {"leading": fold.leading}),
            "loss_first": fold.losses[0] if fold.losses else None,
            "loss_last": fold.losses[-1] if fold.losses else None,
            "source": fold.source,
            "incoming": fold.incoming,
            "merged": fold.merged,
            "notes": list(fold.notes),
            "fold_seconds": fold.seconds,
            "score_seconds": time.perf_counter() - self._scoring if scoring is None else scoring,
        }
        self.steps = [*self.steps[: fold.index - 1], row]
        folder = run_folder(trainer, self.folder)
        if trainer.is_global_zero:
            content = self.content(trainer)
            write_json(folder / "report.json", content)
            if not self._laid_out:
                log_layout(trainer, controls=bool(content["controls"]), recovery=bool(fold.losses))
            self._laid_out = True
            if self.figures:
                log_matrix(trainer, content)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finish the report."""
        if not self.steps or not self._writes(trainer):
            return
        content = self.content(trainer)
        folder = self._finish(trainer, content)
        if not trainer.is_global_zero:
            return
        merge = MergeCallback.of(trainer)
        assert merge is not None
        finish_board(trainer, merge.method, content)
        bar = trainer.progress_bar_callback
        if bar is not None:
            events = any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)
            bar.print(
                f"report, figures and TensorBoard events: {folder}" if events else f"report and figures: {folder}"
            )

    def _finish(self, trainer: L.Trainer, content: Report) -> Path:
        """Write everything; call it on all ranks."""
        folder = run_folder(trainer, self.folder)
        if not trainer.is_global_zero:
            return folder
        write_json(folder / "report.json", content)
        write_text(folder / "report.md", markdown(content))
        if self.figures:
            write_figure(folder / "matrix.png", matrix_figure(content))
            write_figure(folder / "stream.png", stream_figure(content))
        return folder

    def content(self, trainer: L.Trainer) -> Report:
        """The report so far."""
        merge = MergeCallback.of(trainer)
        assert merge is not None
        return {
            "format": 1,
            **describe_stream(trainer, merge.method, merge.merger, merge.live),
            "steps": self.steps,
            "command": _command(),
            "seconds": round(self._seconds(), 1),
            "peak_memory_mib": peak_memory_mib(),
            "merged": self.steps[-1]["merged"] if self.steps else None,
            "environment": environment(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Rows and time so far, as plain values."""
        return {"steps": self.steps, "seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the report of an earlier run."""
        self.steps, self._earlier = list(state_dict["steps"]), float(state_dict["seconds"])

    def _seconds(self) -> float:
        return self._earlier + time.perf_counter() - self._start

    def _writes(self, trainer: L.Trainer) -> bool:
        """A smoke run leaves nothing."""
        return self.enabled and not trainer.fast_dev_run  # type: ignore[attr-defined]


def _command() -> str:
    """The command line, with packaged configurations by their bare names."""
    packaged = f"{config_folder()}{os.sep}"
    return shlex.join([Path(sys.argv[0]).name, *(argument.replace(packaged, "") for argument in sys.argv[1:])])


def run_folder(trainer: L.Trainer, folder: str | None = None) -> Path:
    """Where a run's files go: a given folder, the logger's, or one below the trainer's root. Call it on all ranks.

    A logger without a folder for each run (wandb, MLflow) gets one beside the checkpoints that Lightning saves for it.
    """
    logged = trainer.log_dir  # a collective call: all processes agree on rank 0's answer
    if folder is not None:
        return local_path(folder)
    if not trainer.loggers:
        return Path(trainer.default_root_dir) / "safemerge"
    logger = trainer.loggers[0]
    if logged and isinstance(logger, (TensorBoardLogger, CSVLogger)):
        return Path(logged)
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version or 0}"
    parts: tuple[str, ...] = trainer.strategy.broadcast((str(logger.name), version))  # known to rank 0 alone
    return Path(logger.save_dir or trainer.default_root_dir).joinpath(*parts)
