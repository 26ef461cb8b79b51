"""Data of a merge stream: the tasks seen so far and the held-out control sets, one loader each."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from safemerge_pl.backbones.base import Backbone
from safemerge_pl.data.stream import TaskStream
from safemerge_pl.scoring.scorer import SetScore, ZeroShotScore
from safemerge_pl.zoo import Zoo

__all__ = ["ImageSet", "LabelledSet", "StreamDataModule", "ZooData", "as_it_is"]


@dataclass(frozen=True)
class LabelledSet(ABC):
    """A test set that knows how it is batched and scored.

    Attributes:
        name: of the task or control set.
        rows: a ``datasets.Dataset``.
    """

    name: str
    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    @abstractmethod
    def batches(self, backbone: Backbone) -> Dataset[Any]:
        """Batches for a backbone, fetched whole by ``__getitems__``."""

    @abstractmethod
    def score(self, backbone: Backbone) -> SetScore:
        """What counts and scores a backbone's answers."""


@dataclass(frozen=True)
class ImageSet(LabelledSet):
    """A labelled image set and the text that describes its classes.

    Attributes:
        name: of the task or control set.
        rows: a ``datasets.Dataset`` with the columns ``image`` and ``label``.
        classes: names in label order.
        templates: sentences with ``{}`` for the class name.
    """

    classes: tuple[str, ...]
    templates: tuple[str, ...]

    def batches(self, backbone: Backbone) -> Dataset[Any]:
        """Pairs ``(pixels (N, C, H, W), labels (N,))``."""
        return _LazyPixels(self, backbone)

    def score(self, backbone: Backbone) -> SetScore:
        """Zero-shot accuracy."""
        return ZeroShotScore(self, backbone)


class StreamDataModule(L.LightningDataModule):
    """Order of the tasks and their test sets.

    During ``fit`` the loaders cover the tasks merged by the end of the epoch and all control sets; in ``validate`` and
    ``test`` all tasks and control sets. There is one training batch an epoch, and it is empty: an epoch is a merge.

    Args:
        tasks: names, before shuffling.
        controls: names of the held-out control sets.
        order_seed: see :class:`safemerge_pl.data.stream.TaskStream`.
        batch_size: images a batch.
        num_workers: processes that decode images; 0 decodes in the main process.
        keep_in_memory: keep preprocessed images, so that each is decoded once a run. Off for large sets.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        controls: Sequence[str] = (),
        order_seed: int | None = None,
        batch_size: int = 128,
        num_workers: int = 0,
        keep_in_memory: bool = False,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        self.stream = TaskStream(tasks, order_seed)
        self.controls = tuple(controls)
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

    def settings(self) -> dict[str, Any]:
        """What else the scores on its sets depend on, as plain values."""
        return {}

    @property
    def expected(self) -> Mapping[str, Mapping[str, float]]:
        """Published scores by set, of the ``"pretrained"`` model and of the ``"individual"`` experts on their tasks."""
        return {}

    def image_set(self, name: str) -> LabelledSet:
        """A set, opened once."""
        if name not in self._sets:
            self._sets[name] = self.load_set(name)
        return self._sets[name]

    def setup(self, stage: str) -> None:
        """Open every set, so that all that are missing are known before the stream starts.

        Raises:
            ValueError: with a line for every set that cannot be opened.
        """
        problems = []
        for name in (*self.stream, *self.controls):
            try:
                self.image_set(name)
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

    def loaders(self, names: Sequence[str]) -> list[DataLoader[Any]]:
        """One loader a set; remembers the names in ``eval_names``."""
        self.eval_names = tuple(names)
        return [self.loader(name) for name in names]

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
        rank, world_size = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=ExactShard(len(dataset), rank, world_size),  # type: ignore[arg-type]
            num_workers=self.num_workers,
            collate_fn=as_it_is,
            persistent_workers=False,
            pin_memory=self.num_workers > 0 and torch.cuda.is_available(),
        )

    def dataset(self, name: str, backbone: Backbone) -> Dataset[Any]:
        """Preprocessed examples of a set; batches are fetched whole, so loaders need ``collate_fn=as_it_is``."""
        if name not in self._pixels:
            batches = self.image_set(name).batches(backbone)
            self._pixels[name] = _KeptPixels(batches) if self.keep_in_memory else batches
        return self._pixels[name]

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


class ZooData(StreamDataModule):
    """The embedded zoo's eight tasks and three probes.

    Args:
        tasks: names in the zoo; all eight if left out, or the length of one of the zoo's streams.
        controls: held-out sets; the zoo's three probes if left out.
        order_seed: see :class:`safemerge_pl.data.stream.TaskStream`.
        batch_size: images a batch.
        extra_zoo: folder with more tasks in the zoo's layout.

    Example:
        >>> ZooData(tasks=["flags", "mnist"]).stream.names
        ('flags', 'mnist')
    """

    def __init__(
        self,
        tasks: list[str] | int | None = None,
        controls: list[str] | None = None,
        order_seed: int | None = None,
        batch_size: int = 128,
        extra_zoo: str | None = None,
    ) -> None:
        self.zoo = Zoo(None if extra_zoo is None else Path(extra_zoo))
        names = self.zoo.tasks(tasks) if tasks is None or isinstance(tasks, int) else tasks
        probes = self.zoo.controls if controls is None else controls
        for name in (*names, *probes):
            self.zoo.describe(name)
        super().__init__(names, probes, order_seed, batch_size, keep_in_memory=True)

    def load_set(self, name: str) -> ImageSet:
        """Read a parquet file of the zoo."""
        import datasets
        from pyarrow import parquet

        about = self.zoo.describe(name)
        rows = datasets.Dataset(parquet.read_table(self.zoo.data(name)))  # no copy in the user's cache
        return ImageSet(name, rows, tuple(about["classes"]), tuple(about["templates"]))


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


class _LazyPixels(Dataset[Any]):
    """Decodes and preprocesses a batch when it is asked for."""

    def __init__(self, images: ImageSet, backbone: Backbone) -> None:
        self.images, self._preprocess = images, backbone.preprocessor()

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        try:
            rows = self.images.rows[list(indices)]
            return self._preprocess(rows["image"]), torch.tensor(rows["label"]).long()
        except (OSError, SyntaxError) as error:  # how Pillow reports what it cannot decode
            raise ValueError(
                f"set '{self.images.name}': one of the images {min(indices)} to {max(indices)} cannot be decoded "
                f"({error}); fetch the set again."
            ) from error


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
