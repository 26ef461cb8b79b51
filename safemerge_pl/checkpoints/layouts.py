"""Convert a model to the layout of another library: cut, join and transpose its tensors by their canonical names."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from safemerge_pl.architectures.cuts import is_turned
from safemerge_pl.architectures.families import block_of, tower
from safemerge_pl.architectures.layers import MergeLayer, counterparts, vision_only
from safemerge_pl.architectures.pieces import pieces_of
from safemerge_pl.architectures.rotary import is_paired, reorder
from safemerge_pl.checkpoints.head_size import rotary_size
from safemerge_pl.checkpoints.tensors import Checkpoint, View
from safemerge_pl.errors import CheckpointError

__all__ = ["convert_layout", "layer_index", "turn_alike"]


def convert_layout(pretrained: Checkpoint, wanted: Sequence[str], incoming: Checkpoint) -> Checkpoint | None:
    """Convert an incoming model of another library (open_clip for transformers, ...) to the pretrained model's layout.

    Args:
        pretrained: the model whose names are wanted.
        wanted: those of its tensors that are needed.
        incoming: a checkpoint in which :func:`match_names` does not find them.

    Returns:
        The wanted tensors and whatever else is known, each assembled when it is asked for; ``None`` if the incoming
        model is not the same architecture in another layout.

    Raises:
        CheckpointError: if it is, but a wanted tensor has no known counterpart, or one with rotary rows in another
            order that cannot be told.

    Example:
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> key = "encoder.layers.0.self_attn.k_proj.weight"
        >>> incoming = Memory({"resblocks.0.attn.in_proj_weight": torch.arange(6.0)[:, None]}, "a file")
        >>> convert_layout(Memory({key: torch.ones(2, 1)}, "a folder"), [key], incoming)[key].tolist()
        [[2.0], [3.0]]
    """
    theirs = layer_index(incoming, counterparts(incoming, wanted, pretrained))
    shapes = pretrained.shapes()
    parts = {name: pieces_of(name, shapes) for name in counterparts(pretrained, wanted, pretrained)}
    blocks = [name for name in wanted if block_of(name) and parts[name]]
    locals_, towers = {_local_name(name) for name in incoming}, {tower(name) for name in blocks}
    same = all(_local_name(name) in locals_ for name in blocks)
    if same and len(towers) < 2:  # a prefix that is not known; several towers may each have one
        return None
    if any(part.name not in theirs for name in blocks for part in parts[name]):
        return None
    pieces = {
        name: [(part, theirs[part.name]) for part in own]
        for name, own in parts.items()
        if own and all(part.name in theirs for part in own)
    }
    unknown = [name for name in wanted if name not in pieces]
    if unknown:
        renamed = _renamed(blocks, parts, theirs)
        if same and not renamed:
            return None
        raise CheckpointError(
            f"{incoming.source} is laid out as another library does it, and has no known counterpart of {len(unknown)} "
            f"of {len(wanted)} tensors, first `{unknown[0]}`{renamed}; convert it to the "
            "pretrained model's layout, or give both as folders or both in memory, where transformers has other names "
            "than in its files."
        )
    sizes = {
        mine.name: rotary_size(pretrained, mine.parameter, incoming, its.parameter)
        for name in wanted
        for mine, its in pieces[name]
    }
    needed = set(wanted)  # of the others none whose rows would stand in the wrong order
    whole = {name: both for name, both in pieces.items() if name in needed or not any(_reorders(*two) for two in both)}
    return _Converted(incoming, whole, sizes)


def _renamed(blocks: Sequence[str], parts: Mapping[str, list[MergeLayer]], theirs: Mapping[str, MergeLayer]) -> str:
    """Say what a tensor of each tower is called there, if that is another name."""
    pairs = {tower(name): (name, theirs[parts[name][0].name].parameter) for name in reversed(blocks)}
    found = [f"`{mine}` is `{its}` there" for mine, its in pairs.values() if mine != its]
    return f" ({', '.join(found)})" if found else ""


def _reorders(ours: MergeLayer, theirs: MergeLayer) -> bool:
    return is_paired(ours.parameter) != is_paired(theirs.parameter)


def turn_alike(pretrained: Checkpoint, incoming: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Turn the matrices of an incoming model of the same names as the pretrained model's lie.

    nanoGPT and others store GPT-2's matrices upright; the square ones fit by their shape, and would be mixed up.

    Args:
        pretrained: the model whose names are wanted.
        incoming: the model.
        names: each wanted tensor's name in it.

    Example:
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> gpt2, nano = (Memory({"h.0.mlp.c_fc.weight": torch.ones(*shape)}, "a file") for shape in ((1, 4), (4, 1)))
        >>> turn_alike(gpt2, nano, {"h.0.mlp.c_fc.weight": "h.0.mlp.c_fc.weight"}).shapes()
        {'h.0.mlp.c_fc.weight': (1, 4)}
    """
    ours, theirs = pretrained.shapes(), incoming.shapes()
    sides = {other: (is_turned(name, ours), is_turned(other, theirs)) for name, other in names.items()}
    other_way = {name for name, (mine, its) in sides.items() if None not in (mine, its) and mine != its}
    return _Turned(incoming, other_way) if other_way else incoming


class _Turned(View):
    """A model with some of its matrices transposed."""

    def __init__(self, incoming: Checkpoint, names: set[str]) -> None:
        super().__init__(incoming)
        self._names = names

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).T if name in self._names else super().__getitem__(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Checkpoint`."""
        return super().shape(name)[::-1] if name in self._names else super().shape(name)


def layer_index(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> dict[str, MergeLayer]:
    """Find where a model keeps each canonical piece that it has once; empty if it holds several towers of one kind.

    Args:
        checkpoint: the model.
        names: its tensors to look at; those of the vision tower where there is one, if left out.

    Example:
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> list(layer_index(Memory({"resblocks.1.attn.in_proj_bias": torch.ones(6)}, "a file")))
        ['vision.1.q.bias', 'vision.1.k.bias', 'vision.1.v.bias']
    """
    found: dict[str, list[MergeLayer]] = defaultdict(list)
    starts = set()
    shapes = checkpoint.shapes()
    for name in vision_only(checkpoint) if names is None else names:
        parts = pieces_of(name, shapes)
        block = block_of(name)
        if parts and block:
            starts.add((tower(name), name[: block.start()]))
        for part in parts:
            found[part.name].append(part)
    if len(starts) > len({kind for kind, _ in starts}):
        return {}
    return {name: pieces[0] for name, pieces in found.items() if len(pieces) == 1}


class _Converted(Checkpoint):
    """Tensors assembled from pieces of others.

    Args:
        incoming: the model that holds the others.
        pieces: piece of ours and piece of theirs, in the order of rows, by the name of the whole.
        sizes: rows of a head by the name of our piece, where their rotary rows stand in the other order; else 0.
    """

    def __init__(
        self,
        incoming: Checkpoint,
        pieces: Mapping[str, list[tuple[MergeLayer, MergeLayer]]],
        sizes: Mapping[str, int],
    ) -> None:
        self.source, self.folder, self.notes = incoming.source, incoming.folder, incoming.notes
        self.config = incoming.config
        self._incoming, self._pieces, self._sizes = incoming, dict(pieces), sizes

    def __getitem__(self, name: str) -> Tensor:
        pieces = self._pieces[name]
        found = [self._read(*piece) for piece in pieces]
        if len(found) == 1 and not pieces[0][0].transposed:
            return _squeeze(found[0], pieces[0][0].shape)
        whole = torch.cat(found)
        return whole.T if pieces[0][0].transposed else whole

    def _read(self, ours: MergeLayer, theirs: MergeLayer) -> Tensor:
        found = theirs.view(self._incoming[theirs.parameter])
        size = self._sizes.get(ours.name, 0)
        return reorder(found, size, to_pairs=is_paired(ours.parameter)) if size else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Checkpoint`."""
        ours = self._pieces[name][0][0]
        shapes = [theirs.shape for _, theirs in self._pieces[name]]
        if len(shapes) == 1 and not ours.transposed:
            return ours.shape if _fits(shapes[0], ours.shape) else shapes[0]
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return whole[::-1] if ours.transposed else whole

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Checkpoint`."""
        return self._incoming.dtype(self._pieces[name][0][1].parameter)


def _local_name(name: str) -> str:
    """Cut off what stands before a name's block; without a block, all but the last part."""
    block = block_of(name)
    return name[block.start() :].lstrip(".") if block else name


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether two shapes are equal but for leading dimensions of one."""
    return tuple(_trim(shape)) == tuple(_trim(wanted))


def _trim(shape: Sequence[int]) -> Sequence[int]:
    return _trim(shape[1:]) if len(shape) > 1 and shape[0] == 1 else shape


def _squeeze(tensor: Tensor, wanted: tuple[int, ...]) -> Tensor:
    return tensor.reshape(wanted) if _fits(tuple(tensor.shape), wanted) else tensor
