"""The pretrained model, held so that nobody can change it during a stream."""

from pathlib import Path

from torch import Tensor

from safemerge_pl.checkpoints.adapter import Adapter
from safemerge_pl.checkpoints.open import Source, open_checkpoint
from safemerge_pl.checkpoints.tensors import Checkpoint, tied_names
from safemerge_pl.checkpoints.values import require_finite, require_values
from safemerge_pl.errors import CheckpointError
from safemerge_pl.runtime.cores import map_on_cores

__all__ = ["read_finite", "take_snapshot"]


def read_finite(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read a tensor, and see that it has neither NaN nor Inf.

    Raises:
        CheckpointError: naming file and tensor, if it has.
    """
    tensor = checkpoint[name]
    require_finite(tensor, name, checkpoint.source)
    return tensor


def take_snapshot(pretrained: Source) -> Checkpoint:
    """The pretrained model; copied where somebody else could change its tensors.

    Args:
        pretrained: in any form.

    Raises:
        CheckpointError: if it cannot be read, is an adapter, or holds a tensor that is not plain.

    Example:
        >>> import torch
        >>> weights = {"a": torch.zeros(2)}
        >>> held = take_snapshot(weights)
        >>> _ = weights["a"].add_(1)
        >>> held["a"].tolist()
        [0.0, 0.0]
    """
    checkpoint = open_checkpoint(pretrained)
    if isinstance(checkpoint, Adapter):
        raise CheckpointError(f"{checkpoint.source} is an adapter; `pretrained` needs the whole model it was made for.")
    if isinstance(pretrained, (str, Path, Checkpoint)):
        return checkpoint
    for name in checkpoint:
        require_values(checkpoint[name], name, checkpoint.source)
    aliases = tied_names(checkpoint)
    own = [name for name in checkpoint if name not in aliases]
    tensors = dict(zip(own, map_on_cores(lambda name: checkpoint[name].detach().cpu().clone(), own), strict=True))
    tensors |= {alias: tensors[name] for alias, name in aliases.items()}
    snapshot = open_checkpoint({name: tensors[name] for name in checkpoint})
    snapshot.source, snapshot.config = checkpoint.source, checkpoint.config
    return snapshot
