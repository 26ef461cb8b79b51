"""Write the merged model as a folder that the model's own library loads."""

from pathlib import Path

import lightning as L

from safemerge_pl.callbacks.merge import MergeCallback
from safemerge_pl.callbacks.report import run_folder
from safemerge_pl.folders import OutputDtype, check_output

__all__ = ["MergedModelWriter"]


class MergedModelWriter(L.Callback):
    """At the end of ``fit``, write the merged model with the base model's configuration, tokenizer and processor.

    Args:
        enabled: write it at all.
        folder: where to; ``merged`` in the run's folder if left out. It must be new, empty, or hold an earlier merge.
        dtype: of the written weights; float32 masters are kept beside in any case.
    """

    def __init__(self, enabled: bool = True, folder: str | None = None, dtype: OutputDtype = "same") -> None:
        super().__init__()
        self.enabled, self.folder, self.dtype = enabled, folder, dtype

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse an output that cannot be written, before the stream starts."""
        if stage == "fit" and self.enabled and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            check_output(self._folder(trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the folder, on one process."""
        merge = MergeCallback.of(trainer)
        if not self.enabled or merge is None or merge.merger is None or not merge.tasks or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = self._folder(trainer)
        if trainer.is_global_zero:
            backbone = getattr(pl_module, "backbone", None)
            template = None if backbone is None else backbone.folder()
            merge.merger.save(folder, template=template, dtype=self.dtype)
            if trainer.progress_bar_callback is not None:
                trainer.progress_bar_callback.print(f"merged model: {folder}")
        trainer.strategy.barrier()

    def _folder(self, trainer: L.Trainer) -> Path:
        base = run_folder(trainer)
        return Path(self.folder) if self.folder else base / "merged"
