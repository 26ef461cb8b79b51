"""Find tensors under the names that wrappers, libraries and training scripts give them."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from safemerge_pl.architectures.embeddings import is_vocabulary, shared_names
from safemerge_pl.architectures.families import WRAPPERS
from safemerge_pl.architectures.layers import counterparts
from safemerge_pl.architectures.memory_names import Spelling, spellings
from safemerge_pl.checkpoints.tensors import Checkpoint
from safemerge_pl.errors import CheckpointError

__all__ = ["CommonNames", "match_names", "names_alike"]


class CommonNames(Checkpoint):
    """A model under the names that its file and its modules in memory have in common; fused tensors cut.

    Args:
        tensors: the model, with either's names.

    Attributes:
        places: common name -> where it is kept; without those that two tensors would share.

    Example:
        >>> import torch
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> model = Memory({"layer.0.mlp.weights_in.bias": torch.tensor([1.0, 2.0])}, "a mapping")
        >>> dict(CommonNames(model))
        {'layer.0.mlp.gate_proj.bias': tensor([1.]), 'layer.0.mlp.up_proj.bias': tensor([2.])}
    """

    def __init__(self, tensors: Checkpoint) -> None:
        self.source, self.folder, self.notes = tensors.source, tensors.folder, tensors.notes
        self._tensors = tensors
        found = [
            replace(place, parameter=name)
            for name in tensors
            for place in spellings(_unwrap(name), tensors.shape(name))
        ]
        counts = Counter(place.name for place in found)
        self.places: dict[str, Spelling] = {place.name: place for place in found if counts[place.name] == 1}

    def __getitem__(self, name: str) -> Tensor:
        place = self.places[name]
        tensor = self._tensors[place.parameter]
        return tensor if place.rows is None else tensor[slice(*place.rows)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Checkpoint`."""
        place = self.places[name]
        shape = self._tensors.shape(place.parameter)
        return shape if place.rows is None else (place.rows[1] - place.rows[0], *shape[1:])

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Checkpoint`."""
        return self._tensors.dtype(self.places[name].parameter)


def match_names(wanted: Sequence[str], checkpoint: Checkpoint, beside: Iterable[str] | None = None) -> dict[str, str]:
    """Find each wanted tensor in a checkpoint whose names may carry or lack wrapper and tower prefixes.

    ``_orig_mod.`` and ``module.`` are ignored anywhere; beyond that one prefix on either side may differ
    (``vision_model.``, ``model.visual.``, ...), the same for all tensors. Nothing is matched partly.

    Args:
        wanted: names in the pretrained model.
        checkpoint: the incoming model.
        beside: all names of the pretrained model, which tell of which tower those are; ``wanted`` if left out.

    Returns:
        wanted name -> name in the checkpoint.

    Raises:
        CheckpointError: if a tensor is missing, or there are two ways to match.

    Example:
        >>> import torch
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> incoming = Memory({"module.encoder.fc1.weight": torch.zeros(1, 1)}, "a mapping")
        >>> match_names(["vision_model.encoder.fc1.weight"], incoming)
        {'vision_model.encoder.fc1.weight': 'module.encoder.fc1.weight'}
    """
    available: dict[str, str] = {}
    for name in counterparts(checkpoint, wanted, beside):
        bare = _unwrap(name)
        if bare in available:
            raise CheckpointError(f"{checkpoint.source}: `{available[bare]}` and `{name}` are the same tensor's name.")
        available[bare] = name
    for alias, full in [(alias, full) for bare, full in available.items() for alias in shared_names(bare)]:
        available.setdefault(alias, full)
    targets = {name: _unwrap(name) for name in wanted}
    best: dict[str, str] = {}
    for mine, theirs in _prefix_pairs(list(targets.values()), available):
        matched = {
            name: available[theirs + bare[len(mine) :]]
            for name, bare in targets.items()
            if theirs + bare[len(mine) :] in available
        }
        if len(matched) == len(targets) == len(best) and matched != best:
            raise CheckpointError(
                f"{checkpoint.source} holds the model twice, as `{next(iter(best.values()))}` and as "
                f"`{next(iter(matched.values()))}`; give the tensors of one of them."
            )
        if len(matched) > len(best):
            best = matched
    missing = [name for name in wanted if name not in best]
    if missing:
        found = f"; it has, for example, `{next(iter(checkpoint))}`" if not best and len(checkpoint) else ""
        raise CheckpointError(
            f"{checkpoint.source} lacks {len(missing)} of {len(wanted)} tensors to merge, first `{missing[0]}`{found}: "
            "is it a fine-tune of this pretrained model?"
        )
    return best


def names_alike(matched: Mapping[str, str], others: Iterable[str], checkpoint: Checkpoint) -> dict[str, str]:
    """Find further tensors under the prefix that an earlier match found; those that are absent are left out.

    Args:
        matched: what :func:`match_names` gave.
        others: further names in the pretrained model.
        checkpoint: the incoming model.

    Example:
        >>> import torch
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> incoming = Memory({"model.fc1.weight": torch.zeros(1, 1), "model.fc1.bias": torch.zeros(1)}, "a mapping")
        >>> names_alike({"fc1.weight": "model.fc1.weight"}, ["fc1.bias", "fc2.bias"], incoming)
        {'fc1.bias': 'model.fc1.bias'}
    """
    available = {_unwrap(name): name for name in checkpoint}
    mine, theirs = (_unwrap(name).split(".") for name in next(iter(matched.items())))
    same = 0
    while same < min(len(mine), len(theirs)) and mine[-1 - same] == theirs[-1 - same]:
        same += 1
    drop, put = ("".join(f"{part}." for part in names[: len(names) - same]) for names in (mine, theirs))
    found = {}
    for name in others:
        bare = _unwrap(name)
        core = put + bare[len(drop) :] if bare.startswith(drop) else bare
        if core in available:
            found[name] = available[core]
    return found


def _unwrap(name: str) -> str:
    """Take off the marks that torch.compile, DDP, FSDP and activation checkpointing leave in a name."""
    return re.sub(r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", name)


def _prefix_pairs(targets: list[str], available: Mapping[str, str]) -> list[tuple[str, str]]:
    """List the pairs (prefix to drop from the wanted names, prefix to put instead) that fit the first wanted name."""
    first, pairs = targets[0], []
    speaks = any(map(is_vocabulary, available))  # no vision tower has words
    wrappers = WRAPPERS | ({"text_model", "text_encoder"} if speaks else set())
    for match in re.finditer(r"^|\.", first):
        mine, core = first[: match.end()], first[match.end() :]
        if not set(mine.split(".")[:-1]) <= wrappers or not all(target.startswith(mine) for target in targets):
            break
        theirs = [name[: -len(core)] for name in available if name == core or name.endswith("." + core)]
        pairs += [(mine, prefix) for prefix in theirs if not mine or not prefix.endswith(mine)]
    return pairs
