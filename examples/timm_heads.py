"""A timm classifier with a head for each task: one ``fit`` a task; the shared encoder is merged, the heads are not.

    python examples/timm_heads.py            # the whole comparison
    python examples/timm_heads.py --quick    # a smoke run

Without a download there are no pretrained timm weights, so a tiny transformer is first trained here on one set
(letters); it plays the pretrained model. With the hub at hand, pass ``pretrained=True`` to ``create_model`` instead.
"""

import argparse
import copy

import lightning as L
import timm
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from zoo_halves import classes, halves, show

from safemerge_pl.callbacks import SAFEMergeCallback

TASKS = ["mnist", "fashion", "animal_silhouettes"]


class Heads(L.LightningModule):
    """A shared encoder, and one linear head a task."""

    def __init__(self, encoder: nn.Module, task: str, lr: float) -> None:
        super().__init__()
        self.encoder, self.task, self.lr = encoder, task, lr
        self.heads = nn.ModuleDict({name: nn.Linear(96, len(classes(name))) for name in ("letters", *TASKS)})

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        pixels, labels = batch
        return cross_entropy(self.heads[self.task](self.encoder(pixels)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*self.encoder.parameters(), *self.heads[self.task].parameters()], lr=self.lr)

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


def run(encoder: nn.Module, sets: dict, epochs: int, *callbacks: L.Callback) -> list[dict[str, float]]:
    """Train through all tasks; accuracies after each."""
    L.seed_everything(0)
    module, rows = Heads(copy.deepcopy(encoder), TASKS[0], lr=5e-4), []
    for module.task in TASKS:
        fit(module, sets[module.task][0], epochs, *callbacks)
        rows.append({task: module.accuracy(task, sets[task][1]) for task in TASKS})
    return rows


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: one epoch a task on few images")
    quick = parser.parse_args().quick
    epochs, limit = (1, 64) if quick else (10, None)
    sets = {task: halves(task, limit) for task in ("letters", *TASKS)}

    L.seed_everything(0)
    shape = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 3, "num_classes": 0}
    encoder = timm.create_model("vit_tiny_patch16_224", **shape)
    fit(Heads(encoder, "letters", lr=1e-3), sets["letters"][0], 2 * epochs)

    merge = SAFEMergeCallback(
        boundary="fit",
        module_attr="encoder",
        tasks=TASKS,
        scoring_rank=16,  # the paper's ranks, scaled to a width of 96
        recovery_rank=8,
        task_rank=1,
    )
    show("Sequential fine-tuning", run(encoder, sets, epochs))
    show("The same loop with SAFEMergeCallback", run(encoder, sets, epochs, merge))


if __name__ == "__main__":
    main()
