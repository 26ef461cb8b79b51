"""The weights that are scored: those of an expert, put into a tower for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from safemerge_pl.checkpoints.fit import align, bind_adapter
from safemerge_pl.checkpoints.open import CheckpointError, Source, match_names, open_checkpoint
from safemerge_pl.checkpoints.tensors import tied_names

__all__ = ["expert_weights", "swapped_weights"]


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
