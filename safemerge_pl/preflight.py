"""Whether an incoming model fits the pretrained one, tensor by tensor."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from safemerge_pl.adapters import Adapter
from safemerge_pl.checkpoints import Checkpoint, CheckpointError, match_names
from safemerge_pl.foreign import read_config
from safemerge_pl.layers import vision_only
from safemerge_pl.layouts import relaid
from safemerge_pl.names import names_alike

__all__ = ["Mismatch", "aligned", "is_floating", "require_dtype", "require_finite", "require_fit", "require_values"]


Mismatch = Literal["error", "pretrained"]
"""What to do about an incoming model of another image size or vocabulary: refuse it, or keep the pretrained rows."""

_POSITIONS = re.compile(r"(?:^|\.)(?:position(?:al)?_embeddings?(?:\.weight)?|pos_embed|relative_position_bias_table)$")
_VOCABULARY = re.compile(
    r"(?:^|\.)(?:shared|embed_tokens|token_embedding|wte|word_embeddings|lm_head|embed_out)\.weight$"
)

_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")

_UNLIKE = 0.2
"""Cosine below which an incoming model is taken for a stranger; that of two models trained apart is near 0."""


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
        *_differences(pretrained, others, checkpoint, on_mismatch),
        *_settings(pretrained, checkpoint),
        *_tokenizers(pretrained, parameters, checkpoint),
        *(_likeness(pretrained, names, checkpoint) if values else ()),
    ]
    cut = {theirs: name for name, theirs in names.items() if _is_resized(pretrained, name, checkpoint, theirs)}
    if cut and on_mismatch == "pretrained":
        checkpoint = _Cut(checkpoint, pretrained, cut)
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


def _differences(
    pretrained: Checkpoint, others: Mapping[str, str], incoming: Checkpoint, on_mismatch: Mismatch
) -> Iterator[str]:
    """Notes on tensors that are not merged and have another shape; an error if they tell of another image size."""
    for name, theirs in others.items():
        ours, found = pretrained.shape(name), incoming.shape(theirs)
        same = [size for size in ours if size != 1] == [size for size in found if size != 1]
        if same or not is_floating(pretrained, name):  # integers are numbers of rows, which follow the tables
            continue
        if _POSITIONS.search(name) and ours[-1:] == found[-1:] and on_mismatch == "error":
            raise CheckpointError(
                f"{incoming.source}: `{theirs}` has shape {found}, the pretrained model's `{name}` has {ours}: it was "
                "fine-tuned for another image size or length; fine-tune at the pretrained one, or keep the pretrained "
                "table with `on_mismatch` 'pretrained'."
            )
        yield f"`{theirs}` has shape {found}, the pretrained model's {ours}; it is not merged and stays pretrained"


def _settings(pretrained: Checkpoint, incoming: Checkpoint) -> Iterator[str]:
    """Notes on settings that the weights do not show: same names and shapes, another function (L1)."""
    ours, theirs = _network(pretrained), _network(incoming)
    for key in ours.keys() & theirs.keys():
        if ours[key] != theirs[key]:
            yield (
                f"its configuration has `{key}` {theirs[key]}, the pretrained model's {ours[key]}: the merged weights "
                "run with the pretrained one"
            )
    code = read_config(incoming.folder).get("auto_map")
    if code:
        yield "its configuration names code of its own (auto_map), which is neither run nor copied"


def _network(checkpoint: Checkpoint) -> dict[str, object]:
    config = read_config(checkpoint.folder)
    config = config.get("vision_config") or config
    return {key: config[key] for key in ("hidden_act", "num_attention_heads") if key in config}


def _tokenizers(pretrained: Checkpoint, parameters: Sequence[str], incoming: Checkpoint) -> Iterator[str]:
    """A note if embeddings are merged and the tokenizers differ: rows may stand for other words (E5)."""
    if pretrained.folder is None or incoming.folder is None or not any(map(_VOCABULARY.search, parameters)):
        return
    for name in _TOKENIZERS:
        ours, theirs = pretrained.folder / name, incoming.folder / name
        if ours.exists() and theirs.exists() and ours.read_bytes() != theirs.read_bytes():
            yield f"its {name} is another one than the pretrained model's: do the rows of the embeddings match?"


def _likeness(pretrained: Checkpoint, names: Mapping[str, str], incoming: Checkpoint) -> Iterator[str]:
    """A note if a few of the largest weights have nothing in common: fine-tunes keep a cosine near one."""
    largest = sorted(names, key=lambda name: -math.prod(pretrained.shape(name)))[:4]
    dot = ours = theirs = 0.0
    for name in largest:
        a, b = pretrained[name], incoming[names[name]]
        if a.shape == b.shape and not b.is_meta:
            a, b = a.double(), b.double()
            dot, ours, theirs = (
                dot + float((a * b).sum()),
                ours + float(a.square().sum()),
                theirs + float((b * b).sum()),
            )
    cosine = dot / math.sqrt(ours * theirs) if ours * theirs > 0 else 1.0
    if cosine < _UNLIKE:
        yield f"its weights have a cosine of {cosine:.2f} with the pretrained model's: is it a fine-tune of this model?"


def _is_resized(pretrained: Checkpoint, name: str, incoming: Checkpoint, theirs: str) -> bool:
    """Whether an embedding that is merged has another number of rows."""
    ours, found = pretrained.shape(name), incoming.shape(theirs)
    looked_up = _POSITIONS.search(name) or _VOCABULARY.search(name)
    return bool(looked_up) and len(ours) == len(found) == 2 and ours != found and ours[1] == found[1]


class _Cut(Checkpoint):
    """A model whose embeddings have the pretrained number of rows: shared ones its own, the others pretrained."""

    def __init__(self, incoming: Checkpoint, pretrained: Checkpoint, cut: Mapping[str, str]) -> None:
        self.source, self.folder, self.notes = incoming.source, incoming.folder, incoming.notes
        self._incoming, self._pretrained, self._cut = incoming, pretrained, dict(cut)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._incoming[name]
        if name not in self._cut:
            return tensor
        whole = self._pretrained[self._cut[name]].to(tensor.dtype, copy=True)
        if not _POSITIONS.search(name):  # a row of another table stands for another place in the image
            shared = min(len(whole), len(tensor))
            whole[:shared] = tensor[:shared]
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._incoming)

    def __len__(self) -> int:
        return len(self._incoming)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Checkpoint`."""
        return self._pretrained.shape(self._cut[name]) if name in self._cut else self._incoming.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Checkpoint`."""
        return self._incoming.dtype(name)


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
            elif _is_resized(pretrained, name, incoming, theirs):
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


def is_floating(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is stored in a plain floating-point format; without an error for any other."""
    try:
        return checkpoint.dtype(name).is_floating_point
    except CheckpointError:  # an 8-bit format
        return False


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
