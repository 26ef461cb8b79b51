"""Whether an incoming model fits the pretrained one, tensor by tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from safemerge_pl.adapters import Adapter
from safemerge_pl.checkpoints import Checkpoint, CheckpointError, match_names
from safemerge_pl.layouts import relaid

__all__ = ["aligned", "require_dtype", "require_finite", "require_fit", "require_values"]


def aligned(
    pretrained: Checkpoint, parameters: Sequence[str], incoming: Checkpoint, *, values: bool = True
) -> Checkpoint:
    """An incoming model as one of the pretrained model's kind: an adapter on its base, another layout turned.

    Args:
        pretrained: the model all others were fine-tuned from; adapters are put on it.
        parameters: its names of the parameters to merge.
        incoming: the model to merge.
        values: also read an adapter's tensors; otherwise headers only.

    Returns:
        A checkpoint that holds what :func:`require_fit` looks for, or ``incoming`` as it is.

    Raises:
        CheckpointError: if an adapter does not fit, or changes nothing that is merged.
    """
    if isinstance(incoming, Adapter):
        bound = incoming.bind(pretrained)
        bound.require_change(parameters, values=values)
        return bound
    try:
        match_names(parameters, incoming)
    except CheckpointError:
        other = relaid({name: pretrained.shape(name) for name in parameters}, incoming)
        return incoming if other is None else other
    return incoming


def require_fit(
    pretrained: Checkpoint, parameters: Sequence[str], incoming: Checkpoint, *, values: bool = True
) -> dict[str, str]:
    """See that every parameter to merge is in an incoming model, with the right shape and a dtype that can be merged.

    Args:
        pretrained: the model all others were fine-tuned from.
        parameters: its names of the parameters to merge.
        incoming: the model to merge.
        values: also read the tensors and look for NaN and Inf; otherwise headers only.

    Returns:
        The incoming name of each parameter.

    Raises:
        CheckpointError: naming the tensor and the remedy.
    """
    names = match_names(parameters, incoming)
    for name, theirs in names.items():
        if incoming.shape(theirs) != pretrained.shape(name):
            raise CheckpointError(
                f"{incoming.source}: `{theirs}` has shape {incoming.shape(theirs)}, the pretrained model's "
                f"`{name}` has {pretrained.shape(name)}: is it a fine-tune of this model?"
            )
        require_dtype(incoming, theirs)
        if values:
            require_finite(incoming[theirs], theirs, incoming.source)
    return names


def require_dtype(checkpoint: Checkpoint, name: str) -> None:
    """Refuse a weight that is not stored in a plain floating-point format.

    Raises:
        CheckpointError: for integers and 8-bit floats.
    """
    dtype = checkpoint.dtype(name)
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(
            f"{checkpoint.source}: `{name}` is {dtype}, a quantised or packed weight; give the model in float32, "
            "bfloat16 or float16."
        )


def require_values(tensor: Tensor, name: str, source: str) -> None:
    """Refuse a tensor that has a shape but no values.

    Raises:
        CheckpointError: for a tensor on the meta device.
    """
    if tensor.is_meta:
        raise CheckpointError(f"{source}: `{name}` was never loaded (it is on the meta device); load the model whole.")


def require_finite(tensor: Tensor, name: str, source: str) -> None:
    """Refuse a tensor with NaN or Inf, naming it and how many.

    Raises:
        CheckpointError: if a value is not finite.
    """
    require_values(tensor, name, source)
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    if bad:
        raise CheckpointError(
            f"{source}: `{name}` has {bad} NaN or Inf among {tensor.numel()} values; retrain or repair it."
        )
