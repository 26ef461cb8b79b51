"""Image sets: pictures with class labels, scored by a zero-shot head of the class names."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import Dataset

from safemerge_pl.backbones.base import Backbone
from safemerge_pl.backbones.heads import zero_shot_head
from safemerge_pl.data.labelled import LabelledSet, SetScore
from safemerge_pl.runtime.cores import forward_on_cores

__all__ = ["ImageSet", "ZeroShotScore"]


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


class ZeroShotScore(SetScore):
    """Top-1 accuracy (micro) of an image set by the head that its class names give.

    Args:
        images: the set.
        backbone: loaded; its text tower is the pretrained one.
    """

    def __init__(self, images: ImageSet, backbone: Backbone) -> None:
        self.name, self.backbone = images.name, backbone
        self.head = zero_shot_head(backbone, images.classes, images.templates)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Cosine of each image ``(N, C, H, W)`` with each class: ``(N, classes)`` in ``[-1, 1]``."""
        self.head = self.head.to(inputs.device)
        return normalize(forward_on_cores(self.backbone, inputs).float(), dim=-1) @ self.head.T

    def zero(self) -> Tensor:
        """Right answers, images, and images without an answer, ``(3,)``."""
        return torch.zeros(3, dtype=torch.int64)

    def count(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """See :class:`SetScore`; a batch is ``(pixels, labels)``. Nothing waits for the device here."""
        pixels, labels = batch
        logits = self(pixels)
        right, broken = logits.argmax(1) == labels, ~torch.isfinite(logits).all(1)
        return torch.stack([right.sum(), torch.ones_like(labels).sum(), broken.sum()])

    def value(self, counts: Tensor) -> tuple[float, int]:
        """See :class:`SetScore`."""
        right, counted, broken = counts.tolist()
        if broken:
            raise FloatingPointError(f"the logits on '{self.name}' hold NaN or Inf: a weight or an image is broken.")
        return right / counted if counted else 0.0, counted


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
