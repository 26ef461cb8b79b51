"""What a method merges of a model: found once, and read by every check, the fold and the output."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from safemerge_pl.architectures.embeddings import is_embedding
from safemerge_pl.architectures.layers import (
    MergeLayer,
    find_unknown,
    known_layers,
    matching,
    select_layers,
    vision_only,
)
from safemerge_pl.checkpoints.tensors import Checkpoint, is_floating, tied_names
from safemerge_pl.folding.stacks import plan_stacks
from safemerge_pl.methods.base import MergeMethod
from safemerge_pl.runtime.names import name_list

__all__ = ["MergePlan", "plan_merge"]

_FLOAT32 = 4
"""Bytes of an entry; whatever a model is stored in, it is merged and kept in float32."""


@dataclass(frozen=True)
class MergePlan:
    """What is merged of a pretrained model, and what that costs.

    Attributes:
        pretrained: the model.
        layers: matrices that are merged in stacks.
        others: tensors that are merged one by one.
        aliases: further names of tied tensors -> the first name.
        notes: what the user should know about the choice, a sentence each.
    """

    pretrained: Checkpoint
    layers: list[MergeLayer]
    others: list[MergeLayer]
    aliases: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @cached_property
    def units(self) -> list[MergeLayer]:
        """Everything that is merged: matrices of the stacks, then single tensors."""
        return [*self.layers, *self.others]

    @cached_property
    def parameters(self) -> list[str]:
        """Names of the parameters that are merged, each once."""
        return list(dict.fromkeys(unit.parameter for unit in self.units))

    @cached_property
    def matrices(self) -> list[MergeLayer]:
        """Those units that are multiplied with an input: neither vectors nor tables that are looked up."""
        return [unit for unit in self.units if len(unit.shape) == 2 and not is_embedding(unit.parameter)]

    @cached_property
    def biases(self) -> list[MergeLayer]:
        """Those units that are added to what the matrices and norms give."""
        return [unit for unit in self.units if len(unit.shape) == 1 and unit.parameter.endswith(("bias", "beta"))]

    @property
    def entries(self) -> int:
        """Number of weights that are merged."""
        return sum(unit.entries for unit in self.units)

    @property
    def total(self) -> int:
        """Number of weights of the whole model."""
        return sum(map(math.prod, self.pretrained.shapes().values()))

    @property
    def memory(self) -> int:
        """About the bytes that a fold takes beside the model: three copies of what is merged, and work on one stack."""
        stack = max(sum(unit.entries for unit in part) for part in plan_stacks(self.units))
        return _FLOAT32 * (3 * self.entries + 8 * stack)


def plan_merge(checkpoint: Checkpoint, method: MergeMethod, patterns: str | Sequence[str] | None = None) -> MergePlan:
    """Find what a method merges of a model, from headers alone.

    Args:
        checkpoint: the pretrained model.
        method: says which matrices are merged in stacks, and whether all other tensors are merged too.
        patterns: shell-style patterns of the parameters to merge, instead of the built-in choice.

    Returns:
        The plan; its notes name matrices that the built-in choice passes over since it does not know them.

    Raises:
        ValueError: if nothing is selected, a pattern selects nothing, or the method's settings do not fit a matrix.

    Example:
        >>> import torch
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> from safemerge_pl.methods import OPCM
        >>> model = Memory({"h.0.mlp.c_fc.weight": torch.ones(2, 8), "h.0.ln_1.bias": torch.ones(2)}, "a file")
        >>> plan = plan_merge(model, OPCM())
        >>> [unit.name for unit in plan.layers], [unit.name for unit in plan.others], plan.entries
        (['model.0.up'], ['h.0.ln_1.bias'], 18)
    """
    patterns = None if patterns is None else name_list(patterns, "layers")
    aliases = tied_names(checkpoint)
    mergeable = _find_mergeable(checkpoint, aliases)
    layers = select_layers(mergeable, patterns, method.scope)
    method.check_layers({layer.name: layer.shape for layer in layers})
    taken = {layer.parameter for layer in layers} | aliases.keys()
    others = _find_others(checkpoint, taken, patterns) if method.merges_rest else []
    named = [unit.parameter for unit in others]
    for pattern in patterns or () if method.scope == "none" else ():  # otherwise it was seen with the matrices
        if not matching(named, [pattern]):
            raise ValueError(
                f"`layers` pattern {pattern!r} matches none of the {len(mergeable)} parameters that can be merged."
            )
    if not layers and not others:
        raise ValueError(f"{checkpoint.source} holds no floating-point tensor, so there is nothing to merge.")
    unknown = [] if others or patterns else find_unknown(layers, mergeable)  # what was chosen by name needs no note
    notes = unknown and [
        f"of no known kind and left pretrained: {len(unknown)} of the matrices in its blocks, first `{unknown[0]}`; if "
        "they matter, name the matrices to merge with `layers`"
    ]
    return MergePlan(checkpoint, layers, others, aliases, tuple(notes))


def _find_others(checkpoint: Checkpoint, taken: set[str], patterns: Sequence[str] | None) -> list[MergeLayer]:
    """Tensors outside of the stacks, each as a whole."""
    return [
        MergeLayer(name, name, checkpoint.shape(name))
        for name in (vision_only(checkpoint) if patterns is None else matching(checkpoint, patterns))
        if name not in taken and checkpoint.dtype(name).is_floating_point
    ]


def _find_mergeable(checkpoint: Checkpoint, aliases: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Shapes of what could be merged: no second names, and no integer buffers.

    Integer tensors that stand where a layer should be stay in: a quantised model must be refused, not passed over.
    """
    shapes = {name: shape for name, shape in checkpoint.shapes().items() if name not in aliases}
    known = set(known_layers(shapes))
    return {name: shape for name, shape in shapes.items() if name in known or is_floating(checkpoint, name)}
