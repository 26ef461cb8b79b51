"""Which parameters are merged, under which canonical name, and how they are cut into stacks of equal shape.

Selection goes by parameter name and shape, so it needs no model class and reads only headers. Canonical layer names
(``vision.3.q``, ``encoder.0.cross.v``) are the same for every library that stores the same model; a fused matrix is
split into its parts and a transposed one is turned, so the merge does not depend on how a library lays weights out.
"""

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from safemerge_pl.architectures.cuts import Shapes, cut, rule_of
from safemerge_pl.architectures.embeddings import is_embedding, is_vocabulary
from safemerge_pl.architectures.families import (
    block_of,
    in_text,
    in_vision,
    is_known,
    rules_by_name,
    tower,
    unknown_fusion,
)
from safemerge_pl.architectures.suggest import suggest_layers
from safemerge_pl.runtime.names import name_list

__all__ = [
    "MergeLayer",
    "Scope",
    "counterparts",
    "find_unknown",
    "known_layers",
    "matching",
    "parts_of",
    "select_layers",
    "vision_only",
]

Scope = Literal["selected", "selected_out", "linear", "matrix", "none"]
"""Which matrices are merged: attention and first feed-forward, these and T5's second feed-forward, every linear layer,
every 2-D tensor, or none."""


@dataclass(frozen=True)
class MergeLayer:
    """One matrix to merge: where it lives and how to read it upright.

    Attributes:
        name: canonical name, e.g. ``vision.0.q``.
        parameter: name of the tensor that holds it, in the pretrained checkpoint.
        shape: ``(d_out, d_in)`` of the upright matrix.
        rows: first and last (exclusive) row of the upright tensor, for a part of a fused one.
        transposed: the tensor is stored as ``(d_in, d_out)``.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    transposed: bool = False

    @property
    def entries(self) -> int:
        """How many weights it has."""
        return math.prod(self.shape)

    def view(self, tensor: Tensor) -> Tensor:
        """View the upright ``(d_out, d_in)`` matrix inside ``tensor``, without a copy.

        Example:
            >>> import torch
            >>> MergeLayer("vision.0.k", "attn.in_proj_weight", (2, 2), rows=(2, 4)).view(torch.arange(12).view(6, 2))
            tensor([[4, 5],
                    [6, 7]])
        """
        upright = tensor.T if self.transposed else tensor
        return upright if self.rows is None else upright[self.rows[0] : self.rows[1]]


def select_layers(
    shapes: Mapping[str, Sequence[int]], patterns: str | Sequence[str] | None = None, scope: Scope = "selected"
) -> list[MergeLayer]:
    """Choose the matrices to merge: attention projections and the first feed-forward matrix, as the paper does.

    Of a checkpoint with a vision and a text tower only the vision tower is merged, since the zero-shot heads come from
    the pretrained text tower; of a vision model with a language model both are.

    Args:
        shapes: shape of every tensor of the pretrained model.
        patterns: shell-style patterns (``*.q_proj.weight``) that replace the built-in choice. A tensor of a known
            family is still split and turned as that family needs; any other 2-D tensor is taken as it is.
        scope: ``"selected"`` as above, ``"selected_out"`` with T5's ``wo`` as well, ``"linear"`` for every
            linear layer, ``"matrix"`` for every 2-D tensor, ``"none"`` for no matrix at all.

    Returns:
        The layers in the checkpoint's order.

    Raises:
        ValueError: if nothing is selected, a pattern selects nothing, or a matrix holds q, k and v in unknown order.

    Example:
        >>> [layer.name for layer in select_layers({"visual.transformer.resblocks.0.attn.in_proj_weight": (6, 2)})]
        ['vision.0.q', 'vision.0.k', 'vision.0.v']
    """
    if scope == "none":
        return []
    patterns = None if patterns is None else name_list(patterns, "layers")
    everything = patterns is not None or scope in ("linear", "matrix")
    found = {
        name: _layers_of(name, shapes, keep_unknown=everything, wide=everything or scope != "selected")
        for name in (vision_only(shapes) if patterns is None else matching(shapes, patterns))
        if scope != "linear" or not is_embedding(name)
    }
    if not everything:
        _require_known_order(name for name, parts in found.items() if not parts and len(shapes[name]) == 2)
    for pattern in patterns or ():
        if not any(found[name] for name in found if fnmatch.fnmatchcase(name, pattern)):
            raise ValueError(
                f"`layers` pattern {pattern!r} matches none of the {len(shapes)} parameters that can be merged."
            )
    layers = [layer for parts in found.values() for layer in parts]
    if not layers:
        raise ValueError(
            f"none of the {len(shapes)} parameters is an attention or feed-forward matrix of a known family (CLIP, "
            f"ViT, BERT, T5, Llama, GPT-2, ...); {suggest_layers(shapes)}."
        )
    return _make_distinct(layers)


def _require_known_order(names: Iterable[str]) -> None:
    """Refuse matrices that hold q, k and v in an order that cannot be told from their names."""
    for name in names:
        if unknown_fusion(name):
            raise ValueError(
                f"`{name}` holds q, k and v in an order that differs between models of this name; name the matrices to "
                "merge with `layers`, where it is taken whole."
            )


def _make_distinct(layers: list[MergeLayer]) -> list[MergeLayer]:
    """Give each layer a name of its own.

    Two towers of one unknown kind would share canonical names, so their layers are called after their parameters.
    Beside a decoder, a bare ``encoder`` is the encoder, not a vision tower.
    """
    if any(layer.name.startswith("decoder.") for layer in layers):
        layers = [replace(layer, name=re.sub(r"^vision\.", "encoder.", layer.name)) for layer in layers]
    counts = Counter(layer.name for layer in layers)
    return [
        layer
        if counts[layer.name] == 1
        else replace(layer, name=f"{layer.parameter.removesuffix('.weight')}.{layer.name.rpartition('.')[2]}")
        for layer in layers
    ]


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Keep the names that shell-style patterns choose, of two towers those of the vision tower if there are any.

    A pattern that matches names of both towers means the vision tower, as where nothing is chosen.

    Example:
        >>> names = ["vision_model.layers.0.fc1.weight", "text_model.layers.0.fc1.weight"]
        >>> matching(names, ["*.fc1.weight"]), matching(names, ["text_model.*"])
        (['vision_model.layers.0.fc1.weight'], ['text_model.layers.0.fc1.weight'])
    """
    names = list(names)
    first = vision_only(names)
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in first if fnmatch.fnmatchcase(name, pattern)}
        chosen |= found or {name for name in names if fnmatch.fnmatchcase(name, pattern)}
    return [name for name in names if name in chosen]


def vision_only(names: Iterable[str]) -> list[str]:
    """Keep the names of the vision tower if there is one, else all names.

    All names are kept too if the vision tower feeds a language model, which was fine-tuned with it.

    Example:
        >>> vision_only(["vision_model.a", "text_model.a", "logit_scale"]), vision_only(["encoder.a"])
        (['vision_model.a'], ['encoder.a'])
        >>> len(vision_only(["vision_tower.vision_model.layers.0.a", "language_model.layers.0.a"]))
        2
    """
    names = list(names)
    vision = [name for name in names if in_vision(name)]
    speaks = any(block_of(name) and not in_vision(name) and not in_text(name) for name in names)
    return names if speaks else vision or names


def counterparts(names: Iterable[str], wanted: Iterable[str], beside: Iterable[str] | None = None) -> list[str]:
    """Keep the names of a model among which tensors of another one are looked for: those of the same tower.

    Args:
        names: of the model that is searched.
        wanted: of the tensors that are looked for.
        beside: all names of their model; ``wanted`` if left out.

    Example:
        >>> clip = ["vision_model.layers.0.fc1.weight", "text_model.layers.0.fc1.weight"]
        >>> counterparts(clip, ["layers.0.fc1.weight"]), counterparts(clip, ["text_model.layers.0.fc1.weight"])
        (['vision_model.layers.0.fc1.weight'], ['text_model.layers.0.fc1.weight'])
        >>> counterparts(clip, clip) == clip
        True
    """
    names, wanted = list(names), list(wanted)
    beside = wanted if beside is None else list(beside)
    if any(map(in_vision, beside)):
        usual = set(vision_only(beside))
        if usual.issuperset(wanted):
            return vision_only(names)
        if any(name in usual for name in wanted):
            return names
    elif not any(is_vocabulary(name) or ".text_model." in f".{name}" for name in beside):
        return vision_only(names)
    return [name for name in names if not in_vision(name)]


def find_unknown(layers: Iterable[MergeLayer], shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Find the matrices in the blocks of a model that are of no known kind and not among the layers to merge.

    Example:
        >>> find_unknown([], {"layers.0.mixer.in_proj.weight": (8, 4), "layers.0.mlp.fc2.weight": (4, 8)})
        ['layers.0.mixer.in_proj.weight']
    """
    taken = {layer.parameter for layer in layers}
    return [
        name
        for name in vision_only(shapes)
        if name not in taken and block_of(name) and not is_known(name, shapes[name])
    ]


def known_layers(names: Iterable[str]) -> list[str]:
    """Keep the names that hold a layer of a known family.

    Example:
        >>> known_layers(["blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight"])
        ['blocks.0.mlp.fc1.weight']
    """
    return [name for name in names if rules_by_name(name)]


def parts_of(parameter: str, shapes: Shapes) -> list[MergeLayer]:
    """List the layers of a known family inside one parameter, merged by default or not; none for any other parameter.

    Args:
        parameter: its name.
        shapes: of its whole model, as far as they are known: they tell how it is cut and turned.

    Raises:
        ValueError: if that cannot be told.

    Example:
        >>> name = "visual.transformer.resblocks.0.attn.in_proj_weight"
        >>> [part.rows for part in parts_of(name, {name: (6, 2)})]
        [(0, 2), (2, 4), (4, 6)]
    """
    return _layers_of(parameter, shapes, keep_unknown=False, wide=True)


def _layers_of(parameter: str, shapes: Shapes, *, keep_unknown: bool, wide: bool) -> list[MergeLayer]:
    """List the layers inside one parameter; none if it is of no known family and ``keep_unknown`` is off."""
    shape = shapes[parameter]
    whole = [MergeLayer(parameter.removesuffix(".weight"), parameter, tuple(shape))] if len(shape) == 2 else []
    found = rule_of(parameter, shapes)
    if found is None or (found[0].wide and not wide):
        return whole if keep_unknown else []
    rule, groups = found
    try:
        heights = cut(rule, parameter, shapes)
    except ValueError:
        if keep_unknown:  # as any other matrix whose parts are not known
            return whole
        raise
    d_in = shape[0] if rule.transposed else shape[1]
    layers, start = [], 0
    for name, height in zip(rule.names, heights, strict=True):
        rows = (start, start + height) if len(rule.names) > 1 else None
        canonical = name.format(tower=tower(parameter), **groups)
        layers.append(MergeLayer(canonical, parameter, (height, d_in), rows, rule.transposed))
        start += height
    return layers
