"""Score the weights that a backbone holds: counts a batch, summed over batches and processes, then one number a set."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.nn.functional import normalize

from safemerge_pl.backbones.base import Backbone
from safemerge_pl.backbones.heads import zero_shot_head
from safemerge_pl.checkpoints.fit import align, bind_adapter
from safemerge_pl.checkpoints.open import CheckpointError, Source, match_names, open_checkpoint
from safemerge_pl.checkpoints.tensors import tied_names
from safemerge_pl.runtime.cores import forward_on_cores
from safemerge_pl.scoring.disk_cache import keep_score, kept_score, place_of_score

if TYPE_CHECKING:
    from safemerge_pl.data.module import ImageSet, StreamDataModule

__all__ = ["Scorer", "SetScore", "ZeroShotScore", "evaluating", "expert_weights", "swapped_weights"]


class SetScore(ABC):
    """How one set is scored: an answer an example, counts a batch, one number from the summed counts.

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


class ZeroShotScore(SetScore):
    """Top-1 accuracy (micro) of an image set by the head that its class names give.

    Args:
        images: the set.
        backbone: loaded; its text tower is the pretrained one.
    """

    def __init__(self, images: "ImageSet", backbone: Backbone) -> None:
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


class Scorer:
    """Score of whatever weights a backbone holds on the sets of a data module, inside and outside of a trainer.

    Args:
        backbone: loaded, on the device where scoring runs.
        data: gives the sets by name, and the trainer with its processes if it is attached to one.
    """

    def __init__(self, backbone: Backbone, data: "StreamDataModule") -> None:
        self.backbone, self.data = backbone, data
        self._sets: dict[str, SetScore] = {}
        self._counts: dict[str, Tensor] = {}

    def add(self, name: str) -> SetScore:
        """What scores a set, built once (a head from the pretrained text tower, for example)."""
        if name not in self._sets:
            self._sets[name] = self.data.image_set(name).score(self.backbone)
        return self._sets[name]

    def count(self, name: str, batch: Any) -> None:
        """Add a batch to a set's counts."""
        scoring = self.add(name)
        counts = scoring.count(batch)
        self._counts[name] = self._counts[name] + counts if name in self._counts else counts

    def take(self, name: str) -> tuple[float, int]:
        """Score of a set over all processes, and the examples counted; starts the count anew.

        Raises:
            RuntimeError: if nothing was counted.
        """
        scoring, trainer = self.add(name), self.data.trainer
        counts = self._counts.pop(name, scoring.zero())
        if trainer is not None and trainer.world_size > 1:
            strategy = trainer.strategy
            counts = strategy.reduce(counts.to(strategy.root_device), reduce_op="sum").cpu()
        value, counted = scoring.value(counts)
        if not counted:
            raise RuntimeError(f"nothing of '{name}' was scored: its data set is empty.")
        return value, counted

    def reset(self) -> None:
        """Forget what was counted."""
        self._counts.clear()

    @torch.inference_mode()
    def score(self, name: str) -> float:
        """Go through a whole set and score it; the module may be in the middle of a training epoch."""
        device = next(self.backbone.parameters()).device
        trainer = self.data.trainer
        precision = nullcontext() if trainer is None else trainer.precision_plugin.val_step_context()
        alone = trainer is None or (trainer.world_size == 1 and trainer.precision == "32-true")
        kept = place_of_score(self.backbone, self.data.image_set(name)) if alone else None
        known = kept_score(kept)
        if known is not None:
            return known
        with evaluating(self.backbone), precision:
            for batch in self.data.loader(name, self.backbone):
                self.count(name, move_data_to_device(batch, device))
        score = self.take(name)[0]
        keep_score(kept, score)
        return score


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards each sub-module has its own mode again."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def expert_weights(tower: nn.Module, source: Source, pretrained: Source | None = None) -> dict[str, Tensor]:
    """All tensors of a fine-tuned model by the names of a tower; a tied tensor once, under any name the file has.

    Args:
        tower: the module they are for.
        source: the fine-tuned model, in any form.
        pretrained: what an adapter is put on; the tower itself, if it holds the pretrained weights.

    Raises:
        CheckpointError: if the model lacks one of the tower's tensors, or has two where the tower has one.
    """
    here = open_checkpoint(tower)
    aliases, groups = tied_names(here), dict[str, list[str]]()
    for name in here:
        if here.dtype(name).is_floating_point:
            groups.setdefault(aliases.get(name, name), []).append(name)
    base = here if pretrained is None else open_checkpoint(pretrained)
    checkpoint = bind_adapter(base, list(groups), open_checkpoint(source), values=True)
    tied = [group for group in groups.values() if len(group) > 1]
    present = {group[0]: [name for name in group if _holds(checkpoint, name)] for group in tied}
    for first, second in ((found[0], other) for found in present.values() for other in found[1:]):
        theirs = match_names([first, second], checkpoint)
        if not torch.equal(checkpoint[theirs[first]], checkpoint[theirs[second]]):
            raise CheckpointError(
                f"{checkpoint.source}: `{theirs[second]}` differs from `{theirs[first]}`, which the pretrained model "
                "ties; give a pretrained model with its own head, or an expert without."
            )
    wanted = [(present.get(group[0]) or group)[0] for group in groups.values()]
    return dict(align(base, wanted, checkpoint, on_mismatch="pretrained"))  # refused before, if at all


@contextmanager
def swapped_weights(tower: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Other weights in a module for a while, copied in place and copied back whatever happens."""
    parameters = tower.state_dict(keep_vars=True)
    kept = {name: parameters[name].detach().clone() for name in tensors}
    try:
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(tensor)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in kept.items():
                parameters[name].copy_(tensor)


def _holds(checkpoint: Mapping[str, Tensor], name: str) -> bool:
    return name in checkpoint or any(theirs.endswith("." + name) for theirs in checkpoint)
