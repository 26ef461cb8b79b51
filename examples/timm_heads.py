"""A timm classifier with a head for each task: one ``fit`` a task; the shared encoder is merged, the heads are not.

    python examples/timm_heads.py            # the whole comparison
    python examples/timm_heads.py --quick    # a smoke run

To run without a download, the embedded zoo's vision tower plays the pretrained model, in timm's layout. With the hub at
hand, ``timm.create_model("vit_small_patch16_224", pretrained=True, num_classes=0)`` takes its place.
"""

import lightning as L
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from zoo_halves import classes, halves, length, show, timm_tower

from safemerge_pl.callbacks import SAFEMergeCallback

TASKS = ["mnist", "fashion", "animal_silhouettes"]


class Heads(L.LightningModule):
    """A shared encoder, and one linear head a task."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.task = timm_tower(), TASKS[0]
        self.heads = nn.ModuleDict({task: nn.Linear(128, len(classes(task))) for task in TASKS})

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        pixels, labels = batch
        return cross_entropy(self.heads[self.task](self.encoder(pixels)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        head = {"params": self.heads[self.task].parameters(), "lr": 3e-3}
        return torch.optim.AdamW([{"params": self.encoder.parameters()}, head], lr=3e-4)

    @torch.no_grad()
    def accuracy(self, task: str, data: TensorDataset) -> float:
        self.eval()
        right = [self.heads[task](self.encoder(x)).argmax(1) == y for x, y in DataLoader(data, batch_size=256)]
        self.train()
        return torch.cat(right).float().mean().item()


def fit(module: Heads, data: TensorDataset, epochs: int, *callbacks: L.Callback) -> None:
    """Train on one task."""
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True))


def run(
    sets: dict[str, tuple[TensorDataset, TensorDataset]], epochs: int, *callbacks: L.Callback
) -> list[dict[str, float]]:
    """Train through all tasks; accuracies after each."""
    L.seed_everything(0)
    module, rows = Heads(), []
    for module.task in TASKS:
        fit(module, sets[module.task][0], epochs, *callbacks)
        rows.append({task: module.accuracy(task, sets[task][1]) for task in TASKS})
    return rows


def main() -> None:
    """Compare."""
    epochs, limit = length(__doc__)
    sets = {task: halves(task, limit) for task in TASKS}

    merge = SAFEMergeCallback(
        boundary="fit",
        module_attr="encoder",
        tasks=TASKS,
        scoring_rank=21,  # the paper's ranks, scaled to a width of 128
        recovery_rank=11,
        task_rank=2,
    )
    show("Sequential fine-tuning", run(sets, epochs))
    show("The same loop with SAFEMergeCallback", run(sets, epochs, merge))


if __name__ == "__main__":
    main()
