"""What a test set must offer: batches for a backbone, and the score that counts its answers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from safemerge_pl.backbones.base import Backbone

__all__ = ["LabelledSet", "SetScore"]


class SetScore(ABC):
    """How one set is scored: one answer per example, counts per batch, one number from the summed counts.

    Counts are sums, so that they can be added over batches and over processes in any order with one result.
    """

    @abstractmethod
    def __call__(self, inputs: Any) -> Any:
        """What the backbone answers to the inputs of a batch."""

    @abstractmethod
    def zero(self) -> Tensor:
        """Counts before the first batch."""

    @abstractmethod
    def count(self, batch: Any) -> Tensor:
        """Counts of a batch, of the shape of :meth:`zero`, on any device."""

    def value(self, counts: Tensor) -> tuple[float, int]:
        """The set's score and the number of examples in it; by default counts are ``(right, counted)``.

        Raises:
            FloatingPointError: if an answer of the model was NaN or Inf.
        """
        right, counted = counts.tolist()
        return right / counted if counted else 0.0, counted


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
