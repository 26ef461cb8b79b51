"""Fine-tune a CLIP vision tower on three tasks, one after the other, in one ``fit``; then the same with merging.

    python examples/continual_finetune.py            # the whole comparison
    python examples/continual_finetune.py --quick    # a smoke run

LightningModule and data module are as one would write them anyway. Only the callback is added: it folds each task when
its epochs are over, has that epoch's validation score the merged tower, and hands the pretrained weights back.
"""

import lightning as L
import torch
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader
from zoo_halves import classes, halves, length, show

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.backbones.heads import zero_shot_head
from safemerge_pl.callbacks import SAFEMergeCallback, StreamReport

TASKS = ["mnist", "animal_silhouettes", "flags"]


class Finetune(L.LightningModule):
    """CLIP with fixed text heads; the vision tower is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = CLIPBackbone("zoo")
        self.clip.load()
        self.clip.train()
        self.clip.visual_projection.requires_grad_(False)
        for task in TASKS:
            head = zero_shot_head(self.clip, classes(task), ["a picture of a {}."])
            self.register_buffer(f"head_{task}", head, persistent=False)

    def logits(self, pixels: torch.Tensor, task: str) -> torch.Tensor:
        return 100 * normalize(self.clip(pixels), dim=-1) @ getattr(self, f"head_{task}").T

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        pixels, labels = batch
        loss = cross_entropy(self.logits(pixels, self.trainer.datamodule.task), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        pixels, labels = batch
        right = self.logits(pixels, TASKS[dataloader_idx]).argmax(1) == labels
        self.log("val_acc", right.float().mean(), on_epoch=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-4)


class TaskAfterTask(L.LightningDataModule):
    """Every ``epochs`` epochs the next task; validates on all of them."""

    def __init__(self, epochs: int, limit: int | None) -> None:
        super().__init__()
        self.epochs, self.sets = epochs, {task: halves(task, limit) for task in TASKS}

    @property
    def task(self) -> str:
        return TASKS[self.trainer.current_epoch // self.epochs]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.sets[self.task][0], batch_size=32, shuffle=True)

    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader(test, batch_size=128) for _, test in self.sets.values()]


class Record(L.Callback):
    """Keeps the accuracies of every validation."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = trainer.callback_metrics
        self.rows.append({task: float(found[f"val_acc/dataloader_idx_{i}"]) for i, task in enumerate(TASKS)})


def run(epochs: int, limit: int | None, *callbacks: L.Callback) -> list[dict[str, float]]:
    """Train through all tasks; accuracies at the end of each."""
    L.seed_everything(0)
    record = Record()
    trainer = L.Trainer(
        max_epochs=epochs * len(TASKS),
        check_val_every_n_epoch=epochs,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        callbacks=[record, *callbacks],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
        default_root_dir="runs/continual_finetune",
    )
    trainer.fit(Finetune(), TaskAfterTask(epochs, limit))
    return record.rows


def main() -> None:
    """Compare."""
    epochs, limit = length(__doc__)

    merge = SAFEMergeCallback(
        epochs_per_task=epochs,
        module_attr="clip.vision_model",
        tasks=TASKS,
        metric="val_acc",
        scoring_rank=21,  # the paper's ranks, scaled to a width of 128
        recovery_rank=11,
        task_rank=2,
    )
    merged = run(epochs, limit, merge, StreamReport())
    show("Sequential fine-tuning", run(epochs, limit))
    show("The same loop with SAFEMergeCallback", merged)


if __name__ == "__main__":
    main()
