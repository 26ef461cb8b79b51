"""Data of a merge stream: the tasks seen so far and the held-out control sets, one loader each."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from safemerge_pl.backbones.base import Backbone
from safemerge_pl.backbones.hyper_parameters import require_known_file
from safemerge_pl.data.labelled import LabelledSet
from safemerge_pl.data.stream import TaskStream
from safemerge_pl.runtime.names import name_list

__all__ = ["ExactShard", "StreamDataModule", "as_it_is"]


class StreamDataModule(L.LightningDataModule, ABC):
    """Order of the tasks and their test sets; a kind of data says in :meth:`load_set` where a set comes from.

    During ``fit`` the loaders cover the tasks merged by the end of the epoch and all control sets; in ``validate`` and
    ``test`` all tasks and control sets. Each epoch is one merge and has one training batch, which is empty.

    Args:
        tasks: names, before shuffling.
        controls: names of the held-out control sets.
        order_seed: see :class:`safemerge_pl.data.stream.TaskStream`.
        batch_size: images per batch.
        num_workers: processes that decode images; 0 decodes in the main process.
        keep_in_memory: keep preprocessed images, so that each is decoded once per run. Off for large sets.
    """

    def __init__(
        self,
        tasks: str | Sequence[str],
        controls: str | Sequence[str] = (),
        order_seed: int | None = None,
        batch_size: int = 128,
        num_workers: int = 0,
        keep_in_memory: bool = False,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        self.stream = TaskStream(tasks, order_seed)
        self.controls = tuple(name_list(controls, "controls"))
        twins = set(self.controls) & set(self.stream)
        if twins or len(set(self.controls)) < len(self.controls):
            raise ValueError(f"`controls` must be distinct and no tasks, got {', '.join(self.controls)}.")
        self.batch_size, self.num_workers, self.keep_in_memory = batch_size, num_workers, keep_in_memory
        self.eval_names: tuple[str, ...] = ()  # of the loaders handed out last, in their order
        self._sets: dict[str, LabelledSet] = {}
        self._pixels: dict[str, Dataset[Any]] = {}

    @abstractmethod
    def load_set(self, name: str) -> LabelledSet:
        """Open a task's test set or a control set."""

    @_restricted_classmethod  # as Lightning's own: calling it on an instance is an error
    def load_from_checkpoint(
        cls,  # noqa: N805
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> "StreamDataModule":
        """A data module from a checkpoint, once what the checkpoint names is known to be harmless.

        Raises:
            CheckpointError: if it names a class.
        """
        plain = weights_only is not False
        require_known_file(cls, checkpoint_path, hparams_file, plain, kwargs)
        return super().load_from_checkpoint(checkpoint_path, map_location, hparams_file, plain, **kwargs)

    def settings(self) -> dict[str, Any]:
        """What else the scores on its sets depend on, as plain values."""
        return {}

    @property
    def expected(self) -> Mapping[str, Mapping[str, float]]:
        """Published scores by set, of the ``"pretrained"`` model and of the ``"individual"`` experts on their tasks."""
        return {}

    def labelled_set(self, name: str) -> LabelledSet:
        """A set, opened once."""
        if name not in self._sets:
            self._sets[name] = self.load_set(name)
        return self._sets[name]

    def setup(self, stage: str) -> None:
        """Open every set, so that all that are missing are known before the stream starts.

        Raises:
            ValueError: with one line for every set that cannot be opened.
        """
        problems = []
        for name in (*self.stream, *self.controls):
            try:
                self.labelled_set(name)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))

    def train_dataloader(self) -> DataLoader[Any]:
        """One empty batch: an epoch is one merge."""
        return DataLoader(_OneEmptyBatch(), batch_size=None)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        """Loaders of what is to be scored next."""
        return self.loaders((*self.stream.names[: self._merged_by_now()], *self.controls))

    def test_dataloader(self) -> list[DataLoader[Any]]:
        """Loaders of all tasks and control sets."""
        return self.loaders((*self.stream, *self.controls))

    def loaders(self, names: str | Sequence[str]) -> list[DataLoader[Any]]:
        """One loader per set; remembers the names in ``eval_names``."""
        self.eval_names = tuple(name_list(names, "names"))
        return [self.loader(name) for name in self.eval_names]

    def loader(self, name: str, backbone: Backbone | None = None) -> DataLoader[Any]:
        """Batches of one set, shared out exactly among the trainer's processes.

        Args:
            name: of the set.
            backbone: whose input is wanted; by default that of the trainer's module.
        """
        trainer = self.trainer
        if backbone is None:
            if trainer is None:
                raise RuntimeError("the data module is not attached to a trainer.")
            backbone = trainer.lightning_module.backbone  # type: ignore[assignment]
        if not isinstance(backbone, Backbone):
            raise RuntimeError("the module that is scored has no Backbone.")
        dataset = self.dataset(name, backbone)
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=self._share(len(dataset)),  # type: ignore[arg-type]
            num_workers=self.num_workers,
            collate_fn=as_it_is,
            persistent_workers=False,
            pin_memory=self.num_workers > 0 and torch.cuda.is_available(),
        )

    def count_batches(self, name: str) -> int:
        """Number of batches of one set that this process gets; no example is read for it."""
        return math.ceil(len(self._share(len(self.labelled_set(name)))) / self.batch_size)

    def dataset(self, name: str, backbone: Backbone) -> Dataset[Any]:
        """Preprocessed examples of a set; batches are fetched whole, so loaders need ``collate_fn=as_it_is``."""
        if name not in self._pixels:
            batches = self.labelled_set(name).batches(backbone)
            self._pixels[name] = _KeptPixels(batches) if self.keep_in_memory else batches
        return self._pixels[name]

    def _share(self, length: int) -> "ExactShard":
        trainer = self.trainer
        return ExactShard(length, *((0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)))

    def _merged_by_now(self) -> int:
        """Tasks merged when the coming validation runs.

        Lightning asks for the loaders before the first merge, and on resume with an epoch counter that is one too low;
        so neither the position nor the epoch alone tells.
        """
        trainer = self.trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return len(self.stream)
        position = len(getattr(trainer.lightning_module, "merged_tasks", ()))
        return min(len(self.stream), max(position, trainer.current_epoch + 1))


class ExactShard(DistributedSampler[Any]):
    """Every ``world_size``-th sample from ``rank`` on: nothing is padded, so no sample counts twice.

    It is a ``DistributedSampler`` in name only, so that Lightning leaves it alone.

    Example:
        >>> [list(ExactShard(5, rank, 2)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3]]
    """

    def __init__(self, length: int, rank: int, world_size: int) -> None:
        self._indices = range(rank, length, world_size)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the order never changes."""


class _OneEmptyBatch(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(0)

    def __len__(self) -> int:
        return 1


class _KeptPixels(Dataset[Any]):
    """All batches of a set, preprocessed once."""

    def __init__(self, source: Any) -> None:
        self.pixels, self.labels = source.__getitems__(list(range(len(source))))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.pixels[indices], self.labels[indices]


def as_it_is(batch: Any) -> Any:
    """A batch that was fetched whole needs no collating."""
    return batch
