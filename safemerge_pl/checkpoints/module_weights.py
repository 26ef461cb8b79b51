"""Read the weights of a module from a checkpoint of the model that it was made from."""

import sys
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from safemerge_pl.checkpoints.adapter_modules import plain_name
from safemerge_pl.checkpoints.names import match_names
from safemerge_pl.checkpoints.open import Source, open_checkpoint
from safemerge_pl.checkpoints.tensors import Checkpoint
from safemerge_pl.errors import CheckpointError

__all__ = ["holds_exactly", "read_for_module"]


def holds_exactly(module: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a module has these tensors and no others, by the names that they have without adapters around them.

    Example:
        >>> module = nn.Linear(1, 1, bias=False)
        >>> weight = module.weight.detach()
        >>> [holds_exactly(module, each) for each in ({"weight": weight}, {"weight": weight + 1}, {})]
        [True, False, False]
    """
    found = {plain_name(name): tensor for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}
    return found.keys() == set(tensors) and all(torch.equal(found[name].cpu(), tensors[name]) for name in found)


def read_for_module(module: nn.Module, tensors: Mapping[str, Tensor], source: Source) -> dict[str, Tensor]:
    """Read a module's floating-point tensors from a checkpoint, in the dtypes that the module has them in.

    Args:
        module: tells of which class the model is: transformers gives some models other names in memory than in files.
        tensors: the module's own tensors, by the names that are wanted.
        source: the checkpoint.

    Raises:
        CheckpointError: if the checkpoint lacks a tensor, or has it in another shape.

    Example:
        >>> module = nn.Linear(2, 1, bias=False).half()
        >>> read_for_module(module, module.state_dict(), {"model.weight": torch.ones(1, 2)})
        {'weight': tensor([[1., 1.]], dtype=torch.float16)}
    """
    checkpoint, wanted = open_checkpoint(source), [name for name, each in tensors.items() if each.is_floating_point()]
    try:
        names = match_names(wanted, checkpoint)
    except CheckpointError:
        checkpoint = _as_in_memory(module, checkpoint)
        names = match_names(wanted, checkpoint)
    for name, theirs in names.items():
        if checkpoint.shape(theirs) != tuple(tensors[name].shape):
            raise CheckpointError(
                f"{checkpoint.source}: `{theirs}` has shape {checkpoint.shape(theirs)}, the module's `{name}` has "
                f"{tuple(tensors[name].shape)}: is it the model that this module was made from?"
            )
    return {name: checkpoint[theirs].to(tensors[name].dtype) for name, theirs in names.items()}


def _as_in_memory(module: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """Read a folder with the module's own class: transformers gives some models other names in memory than in files."""
    transformers = sys.modules.get("transformers")  # never imported: a module of its classes has done so
    if transformers is None or not isinstance(module, transformers.PreTrainedModel) or checkpoint.folder is None:
        return checkpoint
    try:
        options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
        loaded, found = type(module).from_pretrained(checkpoint.folder, **options)
    except (OSError, ValueError, RuntimeError):
        return checkpoint
    if found["missing_keys"] or found["mismatched_keys"]:  # they would be random
        return checkpoint
    opened = open_checkpoint(loaded.state_dict())
    opened.source = checkpoint.source
    return opened
