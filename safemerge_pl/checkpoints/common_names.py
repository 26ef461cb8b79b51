"""Match a module in memory with its file, where transformers 5 gives the tensors of the two other names."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from safemerge_pl.architectures.memory_names import Spelling, spellings
from safemerge_pl.checkpoints.names import match_names, names_alike, unwrap
from safemerge_pl.checkpoints.tensors import Checkpoint, View
from safemerge_pl.errors import CheckpointError

__all__ = ["CommonNames", "Respelt", "respell"]


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
            replace(place, parameter=name) for name in tensors for place in spellings(unwrap(name), tensors.shape(name))
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


class Respelt(View):
    """A model under the names of another one that holds the same modules, in memory or as a file.

    Args:
        tensors: the model.
        parts: names of those of its tensors that make one of the other, in the order of rows.
    """

    def __init__(self, tensors: CommonNames, parts: Mapping[str, list[str]]) -> None:
        super().__init__(tensors)
        self._common, self._parts = tensors, dict(parts)

    def __getitem__(self, name: str) -> Tensor:
        found = [self._under[part] for part in self._parts[name]]
        return found[0] if len(found) == 1 else torch.cat(found)

    def origins(self, name: str) -> list[str]:
        """The model's own names of what makes a tensor."""
        return [self._common.places[part].parameter for part in self._parts[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Checkpoint`."""
        first, *others = (self._under.shape(part) for part in self._parts[name])
        return (first[0] + sum(shape[0] for shape in others), *first[1:]) if others else first

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Checkpoint`."""
        return self._under.dtype(self._parts[name][0])


def respell(pretrained: Checkpoint, wanted: Sequence[str], incoming: Checkpoint) -> Respelt | None:
    """Find the tensors of a model that is in memory in its file, or the reverse, where these have other names.

    Args:
        pretrained: the model whose names are wanted.
        wanted: those of its tensors that are needed.
        incoming: a checkpoint in which :func:`match_names` does not find them.

    Returns:
        The wanted tensors, and what else has a counterpart; ``None`` if one of the wanted has none.

    Example:
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> name = "encoder.layer.0.attention.attention.query.weight"
        >>> memory = Memory({"layers.0.attention.q_proj.weight": torch.ones(1, 1)}, "a module in memory")
        >>> respell(Memory({name: torch.zeros(1, 1)}, "a folder"), [name], memory)[name]
        tensor([[1.]])
    """
    common = CommonNames(incoming)
    parts = {name: [place.name for place in spellings(unwrap(name), pretrained.shape(name))] for name in pretrained}
    must = [part for name in wanted for part in parts[name]]
    every = [part for own in parts.values() for part in own]
    try:
        found = match_names(must, common, every)
    except CheckpointError:
        return None
    found |= names_alike(found, [part for part in every if part not in found], common)
    return Respelt(common, {name: [found[p] for p in own] for name, own in parts.items() if found.keys() >= set(own)})
