"""Whether an incoming model fits the pretrained one, tensor by tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from safemerge_pl.architectures.layers import vision_only
from safemerge_pl.checkpoints.adapter import Adapter
from safemerge_pl.checkpoints.differences import Cut, Mismatch, differences, is_resized, settings, tokenizers
from safemerge_pl.checkpoints.layouts import relaid
from safemerge_pl.checkpoints.names import names_alike
from safemerge_pl.checkpoints.open import Checkpoint, CheckpointError, match_names

__all__ = ["aligned", "is_finite", "require_dtype", "require_finite", "require_fit", "require_values"]


def aligned(
    pretrained: Checkpoint,
    parameters: Sequence[str],
    incoming: Checkpoint,
    *,
    values: bool = True,
    on_mismatch: Mismatch = "error",
) -> Checkpoint:
    """An incoming model as one of the pretrained model's kind: an adapter on its base, another layout turned.

    Args:
        pretrained: the model all others were fine-tuned from; adapters are put on it.
        parameters: its names of the parameters to merge.
        incoming: the model to merge.
        values: also read an adapter's tensors; otherwise headers only.
        on_mismatch: ``"pretrained"`` takes a model of another image size or vocabulary: its position table is left
            out, and of its embeddings only the rows that both models have are merged.

    Returns:
        A checkpoint that holds what :func:`require_fit` looks for, with notes on what differs beside it.

    Raises:
        CheckpointError: if an adapter does not fit or changes nothing that is merged, or sizes differ.
    """
    checkpoint = _placed(pretrained, parameters, incoming, values=values)
    try:
        names = match_names(parameters, checkpoint)
    except CheckpointError:
        return checkpoint  # require_fit says what is missing
    rest = [name for name in vision_only(pretrained) if name not in names]
    others = names_alike(names, rest, checkpoint)
    notes = [
        *differences(pretrained, others, checkpoint, on_mismatch),
        *settings(pretrained, checkpoint),
        *tokenizers(pretrained, parameters, checkpoint),
    ]
    cut = {theirs: name for name, theirs in names.items() if is_resized(pretrained, name, checkpoint, theirs)}
    if cut and on_mismatch == "pretrained":
        checkpoint = Cut(checkpoint, pretrained, cut)
        notes += [f"`{theirs}` is merged in the rows that both models have" for theirs in cut]
    checkpoint.notes = (*checkpoint.notes, *(note for note in notes if note not in checkpoint.notes))
    return checkpoint


def _placed(pretrained: Checkpoint, parameters: Sequence[str], incoming: Checkpoint, *, values: bool) -> Checkpoint:
    """An adapter on its base, another library's layout under the pretrained names, anything else as it is."""
    if isinstance(incoming, Adapter):
        bound = incoming.bind(pretrained)
        bound.require_change(parameters, values=values)
        return bound
    try:
        match_names(parameters, incoming)
    except CheckpointError:
        other = relaid(pretrained, parameters, incoming)
        return incoming if other is None else other
    return incoming


def require_fit(
    pretrained: Checkpoint, parameters: Sequence[str], incoming: Checkpoint, *, values: bool = True
) -> dict[str, str]:
    """See that every parameter to merge is in an incoming model, with the right shape and a dtype that can be merged.

    Args:
        pretrained: the model all others were fine-tuned from.
        parameters: its names of the parameters to merge.
        incoming: the model to merge, as :func:`aligned` gives it.
        values: also read the tensors and look for NaN and Inf; otherwise headers only.

    Returns:
        The incoming name of each parameter.

    Raises:
        CheckpointError: naming the tensor and the remedy.
    """
    names = match_names(parameters, incoming)
    for name, theirs in names.items():
        found = incoming.shape(theirs)
        if found != pretrained.shape(name):
            if 0 in found:
                hint = "it is partitioned (ZeRO-3, FSDP); gather the checkpoint first"
            elif is_resized(pretrained, name, incoming, theirs):
                hint = (
                    "resize its embeddings to the pretrained model's, or merge the rows that both have with "
                    "`on_mismatch` 'pretrained'"
                )
            else:
                hint = "is it a fine-tune of this model?"
            raise CheckpointError(
                f"{incoming.source}: `{theirs}` has shape {found}, the pretrained model's `{name}` has "
                f"{pretrained.shape(name)}: {hint}"
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


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has neither NaN nor Inf. A finite sum says so in one pass; an infinite one may be an overflow.

    Example:
        >>> [is_finite(torch.tensor(values)) for values in ([1.0, 3e38, 3e38], [1.0, float("nan")])]
        [True, False]
    """
    if tensor.is_floating_point() and torch.isfinite(tensor.sum(dtype=torch.float32)):
        return True
    return bool(torch.isfinite(tensor).all())


def require_finite(tensor: Tensor, name: str, source: str) -> None:
    """Refuse a tensor with NaN or Inf, naming it and how many.

    Raises:
        CheckpointError: if a value is not finite.
    """
    require_values(tensor, name, source)
    if is_finite(tensor):
        return
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    raise CheckpointError(
        f"{source}: `{name}` has {bad} NaN or Inf among {tensor.numel()} values; retrain or repair it."
    )
