"""Score weights on image sets outside any Lightning loop."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

from safemerge_pl.backbones import Backbone
from safemerge_pl.checkpoints import Source, match_names, open_checkpoint
from safemerge_pl.cores import forward_on_cores
from safemerge_pl.data import StreamDataModule, as_it_is
from safemerge_pl.heads import zero_shot_head
from safemerge_pl.preflight import aligned

__all__ = ["Scorer", "expert_weights", "swapped_weights"]


class Scorer:
    """Accuracy of whatever weights a backbone holds; heads are computed once from the pretrained text tower.

    Args:
        backbone: loaded, on the device where scoring runs.
        data: gives the sets by name.
    """

    def __init__(self, backbone: Backbone, data: StreamDataModule) -> None:
        self.backbone, self.data = backbone, data
        self._heads: dict[str, Tensor] = {}

    @torch.inference_mode()
    def accuracy(self, name: str) -> float:
        """Share of a set's images that get their own class, micro."""
        images = self.data.image_set(name)
        if name not in self._heads:
            self._heads[name] = zero_shot_head(self.backbone, images.classes, images.templates)
        device = next(self.backbone.parameters()).device
        head = self._heads[name].to(device)
        loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
            self.data.dataset(name, self.backbone),
            batch_size=self.data.batch_size,
            num_workers=self.data.num_workers,
            collate_fn=as_it_is,
        )
        right = torch.zeros((), dtype=torch.int64, device=device)
        for pixels, labels in loader:
            features = normalize(forward_on_cores(self.backbone, pixels.to(device)).float(), dim=-1)
            logits = features @ head.T
            if not torch.isfinite(logits).all():
                raise FloatingPointError(f"the logits on '{name}' hold NaN or Inf: a weight or an image is broken.")
            right += (logits.argmax(1) == labels.to(device)).sum()
        return int(right) / len(images)


def expert_weights(pretrained: Source, source: Source) -> dict[str, Tensor]:
    """All tensors of a fine-tuned model by the names of a tower.

    Args:
        pretrained: the tower with its pretrained weights; an adapter is put on these.
        source: the fine-tuned model, in any form.

    Raises:
        CheckpointError: if the model lacks one of the tower's tensors.
    """
    base = open_checkpoint(pretrained)
    wanted = [name for name in base if base.dtype(name).is_floating_point]
    checkpoint = aligned(base, wanted, open_checkpoint(source), on_mismatch="pretrained")  # refused before, if at all
    return {name: checkpoint[theirs] for name, theirs in match_names(wanted, checkpoint).items()}


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
