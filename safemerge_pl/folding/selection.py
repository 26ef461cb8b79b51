"""What a method merges of a model."""

import fnmatch
from collections.abc import Mapping, Sequence

from safemerge_pl.architectures.layers import MergeLayer, known_layers, passed_over, select_layers, vision_only
from safemerge_pl.checkpoints.differences import is_floating
from safemerge_pl.checkpoints.tensors import Checkpoint
from safemerge_pl.methods.base import MergeMethod
from safemerge_pl.output.weights import tied_names

__all__ = ["left_out", "what_is_merged"]


def what_is_merged(
    checkpoint: Checkpoint, method: MergeMethod, patterns: Sequence[str] | None = None
) -> tuple[list[MergeLayer], list[MergeLayer]]:
    """Matrices that a method merges in stacks, and tensors that it merges one by one; from headers alone.

    Args:
        checkpoint: the pretrained model.
        method: says which matrices, and whether all others too.
        patterns: shell-style patterns of the parameters to merge, instead of the built-in choice.

    Raises:
        ValueError: if nothing is selected, or a pattern selects nothing.

    Example:
        >>> import torch
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> from safemerge_pl.methods import OPCM
        >>> model = Memory({"h.0.mlp.c_fc.weight": torch.ones(2, 8), "h.0.ln_1.bias": torch.ones(2)}, "a file")
        >>> [[part.name for part in parts] for parts in what_is_merged(model, OPCM())]
        [['model.0.up'], ['h.0.ln_1.bias']]
    """
    aliases = tied_names(checkpoint)
    layers = select_layers(_mergeable(checkpoint, aliases), patterns, method.scope)
    if not method.merges_rest:
        return layers, []
    stacked = {layer.parameter for layer in layers}
    return layers, [
        MergeLayer(name, name, checkpoint.shape(name))
        for name in vision_only(checkpoint)
        if name not in stacked
        and name not in aliases
        and checkpoint.dtype(name).is_floating_point
        and (patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    ]


def left_out(
    checkpoint: Checkpoint,
    layers: Sequence[MergeLayer],
    others: Sequence[MergeLayer],
    patterns: Sequence[str] | None = None,
) -> list[str]:
    """A sentence on matrices that the built-in choice passes over since it does not know them.

    Args:
        checkpoint: the pretrained model.
        layers: what :func:`what_is_merged` found.
        others: likewise.
        patterns: as there; what the user chose by name needs no sentence.

    Example:
        >>> import torch
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> names = ["layers.0.self_attn.q_proj.weight", "layers.0.mixer.in_proj.weight"]
        >>> model = Memory({name: torch.ones(2, 2) for name in names}, "a file")
        >>> left_out(model, select_layers(model.shapes()), [])[0].partition(";")[0]
        'of no known kind and left pretrained: 1 of the matrices in its blocks, first `layers.0.mixer.in_proj.weight`'
    """
    unknown = [] if others or patterns else passed_over(layers, _mergeable(checkpoint, tied_names(checkpoint)))
    return unknown and [
        f"of no known kind and left pretrained: {len(unknown)} of the matrices in its blocks, first `{unknown[0]}`; if "
        "they matter, name the matrices to merge with `layers`"
    ]


def _mergeable(checkpoint: Checkpoint, aliases: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Shapes of what could be merged: no second names, and no integer buffers.

    Integer tensors that stand where a layer should be stay in: a quantised model must be refused, not passed over.
    """
    shapes = {name: shape for name, shape in checkpoint.shapes().items() if name not in aliases}
    known = set(known_layers(shapes))
    return {name: shape for name, shape in shapes.items() if name in known or is_floating(checkpoint, name)}
