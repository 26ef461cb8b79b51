"""Write the merged model as a folder that the model's own library loads."""

from pathlib import Path

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.callbacks.merge import MergeCallback
from safemerge_pl.callbacks.report import run_folder
from safemerge_pl.checkpoints.open import CheckpointError
from safemerge_pl.output.folders import check_output
from safemerge_pl.output.saving import require_output
from safemerge_pl.output.side_files import OutputDtype
from safemerge_pl.output.weights import parse_size
from safemerge_pl.runtime.files import local_path

__all__ = ["MergedModelWriter"]


class MergedModelWriter(L.Callback):
    """At the end of ``fit``, write the merged model with the base model's configuration, tokenizer and processor.

    Args:
        enabled: write it at all.
        folder: where to; ``merged`` in the run's folder if left out. It must be new, empty, or hold an earlier merge.
        dtype: of the written weights; float32 masters are kept beside in any case.
        max_shard_size: weights above this size are written in shards, with an index.
        copy_code: also copy the model's own Python files. They are never run here.
    """

    def __init__(
        self,
        enabled: bool = True,
        folder: str | None = None,
        dtype: OutputDtype = "same",
        max_shard_size: int | str = "5GB",
        copy_code: bool = False,
    ) -> None:
        super().__init__()
        parse_size(max_shard_size)
        self.enabled, self.folder, self.dtype = enabled, folder, dtype
        self.max_shard_size, self.copy_code = max_shard_size, copy_code

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse an output that cannot be written, before the stream starts."""
        if stage == "fit" and self.enabled and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            check_output(self._folder(trainer))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a disk that is too full, now that the size of the model is known."""
        merge = MergeCallback.of(trainer)
        if not self.enabled or trainer.fast_dev_run or merge is None:  # type: ignore[attr-defined]
            return
        merge.ready(trainer, pl_module)
        if merge.merger is None:
            return
        try:
            require_output(merge.merger.plan, self._folder(trainer), template=_template(pl_module), dtype=self.dtype)
        except CheckpointError as error:
            raise MisconfigurationException(f"the merged model could not be written: {error}") from error

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the folder, on one process."""
        merge = MergeCallback.of(trainer)
        if not self.enabled or merge is None or merge.merger is None or not merge.tasks or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = self._folder(trainer)
        if trainer.is_global_zero:
            merge.merger.save(
                folder,
                template=_template(pl_module),
                dtype=self.dtype,
                max_shard_size=self.max_shard_size,
                copy_code=self.copy_code,
                scores=getattr(pl_module, "last_scores", None),  # of the last epoch, that is of the last fold
            )
            if trainer.progress_bar_callback is not None:
                trainer.progress_bar_callback.print(f"merged model: {folder}")
        trainer.strategy.barrier()

    def _folder(self, trainer: L.Trainer) -> Path:
        base = run_folder(trainer)
        return local_path(self.folder) if self.folder else base / "merged"


def _template(pl_module: L.LightningModule) -> Path | None:
    """Folder of the pretrained model, whose files complete the output."""
    backbone = getattr(pl_module, "backbone", None)
    return None if backbone is None else Path(backbone.folder())
