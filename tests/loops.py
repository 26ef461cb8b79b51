"""Somebody's training loops: small LightningModules and data modules that know nothing of merging."""

from collections.abc import Callable
from typing import Any

import lightning as L
import tiny
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from safemerge_pl.callbacks import SAFEMergeCallback

FAST: dict[str, Any] = {"scoring_rank": 4, "recovery_rank": 3, "task_rank": 2, "num_steps": 3}
EPOCHS, TASKS = 2, ["a", "b", "c"]


class Classifier(L.LightningModule):
    """A timm vision transformer with a head beside it; nothing here knows of merging."""

    def __init__(self, encoder: Callable[[], nn.Module] = tiny.timm_vit, lr: float = 1e-2) -> None:
        super().__init__()
        self.encoder, self.lr = encoder(), lr
        with tiny.seeded():
            self.head = nn.Linear(4, 3)
        self.made: list[int] = []  # steps at which an optimiser was made

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.encoder(pixels))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        right = (self(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("val_acc", right, sync_dist=True)

    def configure_optimizers(self) -> Any:
        self.made.append(self.trainer.global_step)
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Resumable(DataLoader[Any]):
    """Goes on inside an epoch where it was, as Lightning needs it for a bit-equal resume there."""

    start = given = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.given = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"] % len(self)


def batches(task: int, *, count: int = 8, size: int = 4) -> DataLoader[Any]:
    pixels = tiny.randn(count, 3, 32, 32, seed=100 + task)
    labels = (torch.arange(count) + task) % 3
    return Resumable(TensorDataset(pixels, labels), size)


class Tasks(L.LightningDataModule):
    """One task after the other, by the trainer's epoch; a validation loader per task."""

    def __init__(self, epochs: int = EPOCHS, size: int = 4) -> None:
        super().__init__()
        self.epochs, self.size = epochs, size

    @property
    def task(self) -> str:
        trainer = self.trainer
        assert trainer is not None
        return TASKS[min(trainer.current_epoch // self.epochs, len(TASKS) - 1)]

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(TASKS.index(self.task), size=self.size)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [batches(task) for task in range(len(TASKS))]


def accuracies(module: Classifier, tasks: int = 3) -> dict[str, float]:
    """Shares of right answers by task, counted by hand."""
    found = {}
    for task, name in zip(range(tasks), TASKS, strict=False):
        pixels, labels = batches(task).dataset.tensors  # type: ignore[attr-defined]
        with torch.no_grad():
            found[name] = (module(pixels).argmax(1) == labels).float().mean().item()
    return found


def live(**options: Any) -> SAFEMergeCallback:
    """The callback under test, in live mode by default."""
    if "boundary" not in options:
        options = {"epochs_per_task": EPOCHS, **options}
    return SAFEMergeCallback(**{**FAST, "module_attr": "encoder", **options})


def encoder(module: Classifier) -> dict[str, Tensor]:
    return tiny.copied(module.encoder.state_dict())


class Watch(L.Callback):
    """Copies of the encoder's weights at the hooks, by epoch."""

    def __init__(self) -> None:
        self.before: dict[int, dict[str, Tensor]] = {}  # at the first batch of each epoch, before training on it
        self.trained: dict[int, dict[str, Tensor]] = {}  # after the last optimiser step of each epoch
        self.scored: dict[int, dict[str, Tensor]] = {}  # in each epoch's validation
        self.states: dict[int, int] = {}  # entries of optimiser state at the first batch of each epoch

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not batch_idx:
            self.before[trainer.current_epoch] = encoder(pl_module)
            self.states[trainer.current_epoch] = len(trainer.optimizers[0].state)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.trained[trainer.current_epoch] = encoder(pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.scored[trainer.current_epoch] = encoder(pl_module)
