"""Run by :mod:`test_live_ddp` on two processes: three tasks in one fit, one fit per task, and a rank that differs."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from loops import TASKS, Classifier, Tasks, encoder, live


class Crooked(Classifier):
    """Changes its weights on one process only."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank:
            with torch.no_grad():
                self.encoder.blocks[0].mlp.fc1.weight.add_(0.1)  # type: ignore[index,operator,union-attr]


def trainer(folder: Path, *callbacks: L.Callback, epochs: int) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=list(callbacks),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1,
        default_root_dir=folder,
    )


def rows(trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
    """Differs between the processes, as a careless function would."""
    return dict.fromkeys(TASKS, 0.25 + 0.5 * trainer.global_rank)


def main(folder: Path) -> None:
    merge, module = live(tasks=TASKS, score=rows, output=str(folder / "out")), Classifier()
    run = trainer(folder, merge, epochs=6)
    run.fit(module, Tasks(size=2))
    run.save_checkpoint(folder / "end.ckpt")
    assert merge.live is not None
    assert merge.merger is not None
    found = {"encoder": encoder(module), "rows": merge.live.scores.rows, "merged": merge.merger.merged_parameters()}
    torch.save(found, folder / f"rank{run.global_rank}.pt")
    merge, module = live(boundary="fit"), Classifier()
    for _ in range(2):
        run = trainer(folder, merge, epochs=1)
        run.fit(module, Tasks(size=2))
    torch.save({"encoder": encoder(module)}, folder / f"fit{run.global_rank}.pt")
    try:
        trainer(folder, live(), epochs=2).fit(Crooked(), Tasks(size=2))
    except RuntimeError as error:
        (folder / f"error{run.global_rank}.txt").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
