"""Weights that a module computes from other tensors: pruned ones and parametrised ones."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from safemerge_pl.checkpoints.adapter_modules import adapter_names, plain_name
from safemerge_pl.checkpoints.open import open_checkpoint
from safemerge_pl.errors import CheckpointError
from safemerge_pl.folding.selection import plan_merge
from safemerge_pl.methods.base import MergeMethod
from safemerge_pl.runtime.modes import evaluating

__all__ = ["computed_weights", "refuse_computed", "refuse_missing"]

_PRUNED = "is pruned (torch.nn.utils.prune)"
_PARAMETRISED = "is parametrised (torch.nn.utils.parametrize)"
_NORMS = {
    WeightNorm: "is normalised (torch.nn.utils.weight_norm)",
    SpectralNorm: "is normalised (torch.nn.utils.spectral_norm)",
}


def computed_weights(module: nn.Module) -> dict[str, str]:
    """Names of the weights that are computed from other tensors of a module, with what computes them.

    Example:
        >>> from torch.nn.utils import prune
        >>> computed_weights(nn.Sequential(prune.identity(nn.Linear(2, 2), "weight")))
        {'0.weight': 'is pruned (torch.nn.utils.prune)'}
    """
    return {name: what for name, what, _ in _computed(module)}


def refuse_computed(module: nn.Module, method: MergeMethod, layers: Sequence[str] | None) -> None:
    """Refuse a module in which something that would be merged is computed from other tensors.

    What is not merged (a weight-normed convolution or head) is left alone.

    Raises:
        CheckpointError: naming the weight and the way out.
    """
    found = list(_computed(module))
    if not found:
        return
    tensors = {plain_name(name): tensor for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}
    tensors |= {name: weight for name, _, weight in found}
    adapters = adapter_names(module)
    try:
        plain = open_checkpoint({name: tensor for name, tensor in tensors.items() if name not in adapters})
        plan = plan_merge(plain, method, layers)
    except ValueError:  # `layers` names the tensors themselves
        return
    matrices, everything = {layer.parameter for layer in plan.layers}, set(plan.parameters)
    for name, what, _ in found:
        if name in (everything if what == _PRUNED else matrices):
            raise CheckpointError(f"`{name}` {what}: it is computed from other tensors and {_way_out(what)}.")


def refuse_missing(module: nn.Module, names: Sequence[str], found: Sequence[str]) -> None:
    """Refuse to read or write tensors that the module no longer has, since something computes them now.

    Args:
        module: whose tensors they are.
        names: of the tensors that are needed.
        found: names of those that the module has.

    Raises:
        CheckpointError: naming the first that is missing, and the way out.
    """
    there = set(found)
    missing = [name for name in names if name not in there]
    if missing:
        what = computed_weights(module).get(missing[0])
        reason = "is not in the module any more" if what is None else f"{what} since the merge began"
        raise CheckpointError(f"`{missing[0]}` {reason}, so it {_way_out(what or '')}.")


def _way_out(what: str) -> str:
    if what == _PRUNED:
        return "cannot be merged; make the pruning permanent first (`prune.remove`), or prune the merged model"
    if what == _PARAMETRISED:
        return "cannot be merged; remove the parametrisation first (`parametrize.remove_parametrizations`)"
    if what:
        return "cannot be merged; remove the normalisation first (`remove_weight_norm`, `remove_spectral_norm`)"
    return "cannot be merged; give the module the tensors that it had when the merge began"


def _computed(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Plain name of each computed weight, what computes it, and a copy of the weight as it is now."""
    for path, part in module.named_modules():
        for name, what in _computed_in(part):
            yield plain_name(f"{path}.{name}" if path else name), what, _weight(part, name)


def _computed_in(part: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of one layer's own computed weights, and what computes them."""
    if is_parametrized(part):
        lists: Any = part.parametrizations
        yield from ((name, _PARAMETRISED) for name in lists)
    hooks: list[Any] = list(part._forward_pre_hooks.values())
    for hook in hooks:
        if isinstance(hook, BasePruningMethod):
            yield hook._tensor_name, _PRUNED
        elif type(hook) in _NORMS:
            yield hook.name, _NORMS[type(hook)]


@torch.no_grad()
def _weight(part: nn.Module, name: str) -> Tensor:
    """A computed weight; in evaluation mode, since a spectral norm moves its estimates whenever it is asked."""
    with evaluating(part):
        weight: Tensor = getattr(part, name)
        return weight.detach().clone()
