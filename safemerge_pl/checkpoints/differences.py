"""What an incoming model differs in beside its merged layers: image size, vocabulary, settings, provenance."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from safemerge_pl.architectures.embeddings import is_position_table, is_vocabulary
from safemerge_pl.checkpoints.refusals import read_config
from safemerge_pl.checkpoints.tensors import Checkpoint, View, is_floating
from safemerge_pl.errors import CheckpointError
from safemerge_pl.runtime.cores import flat_parts

__all__ = ["Cut", "Likeness", "Mismatch", "differences", "is_resized", "settings", "tokenizers"]

Mismatch = Literal["error", "pretrained"]
"""What to do about an incoming model of another image size or vocabulary: refuse it, or keep the pretrained rows."""

_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")

_UNLIKE = 0.2
"""Cosine below which an incoming model is taken for a stranger; that of two models trained apart is near 0."""


def differences(
    pretrained: Checkpoint, others: Mapping[str, str], incoming: Checkpoint, on_mismatch: Mismatch
) -> Iterator[str]:
    """Notes on tensors that are not merged and have another shape; an error if they tell of another image size."""
    for name, theirs in others.items():
        ours, found = pretrained.shape(name), incoming.shape(theirs)
        same = [size for size in ours if size != 1] == [size for size in found if size != 1]
        if same or not is_floating(pretrained, name):  # integers are numbers of rows, which follow the tables
            continue
        if is_position_table(name) and ours[-1:] == found[-1:] and on_mismatch == "error":
            raise CheckpointError(
                f"{incoming.source}: `{theirs}` has shape {found}, the pretrained model's `{name}` has {ours}: it was "
                "fine-tuned for another image size or length; fine-tune at the pretrained one, or keep the pretrained "
                "table with `on_mismatch` 'pretrained'."
            )
        yield f"`{theirs}` has shape {found}, the pretrained model's {ours}; it is not merged and stays pretrained"


def settings(pretrained: Checkpoint, incoming: Checkpoint) -> Iterator[str]:
    """Notes on settings that the weights do not show: same names and shapes, another function."""
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


def tokenizers(pretrained: Checkpoint, parameters: Sequence[str], incoming: Checkpoint) -> Iterator[str]:
    """A note if embeddings are merged and the tokenizers differ: rows may stand for other words."""
    if pretrained.folder is None or incoming.folder is None or not any(map(is_vocabulary, parameters)):
        return
    for name in _TOKENIZERS:
        ours, theirs = pretrained.folder / name, incoming.folder / name
        if ours.exists() and theirs.exists() and ours.read_bytes() != theirs.read_bytes():
            yield f"its {name} is another one than the pretrained model's: do the rows of the embeddings match?"


class Likeness:
    """Cosine between a few of the largest weights of two models: a fine-tune's is near one, a stranger's near zero.

    Args:
        pretrained: the model that the other one should be a fine-tune of.
        parameters: names of what is merged.
    """

    def __init__(self, pretrained: Checkpoint, parameters: Sequence[str]) -> None:
        self._pretrained = pretrained
        self._looked_at = set(sorted(parameters, key=lambda name: -math.prod(pretrained.shape(name)))[:4])
        self._products: dict[str, list[float]] = {}

    def add(self, name: str, tensor: Tensor) -> Tensor:
        """Look at a tensor that is read anyway, on any thread, and hand it on."""
        if name in self._looked_at:
            found = torch.zeros(3, dtype=torch.float64)
            for part in zip(*map(flat_parts, (self._pretrained[name].detach(), tensor.detach())), strict=True):
                a, b = (entries.float().cpu() for entries in part)
                found += torch.stack([a @ b, a @ a, b @ b])
            self._products[name] = found.tolist()
        return tensor

    def notes(self) -> tuple[str, ...]:
        """A sentence if the models have nothing in common."""
        dot, ours, theirs = (sum(column) for column in zip(*self._products.values(), strict=True))
        norms = math.sqrt(ours * theirs)
        if not norms or dot / norms >= _UNLIKE:
            return ()
        cosine = dot / norms
        return (
            f"its weights have a cosine of {cosine:.2f} with the pretrained model's: is it a fine-tune of this model?",
        )


def is_resized(pretrained: Checkpoint, name: str, incoming: Checkpoint, theirs: str) -> bool:
    """Whether an embedding that is merged has another number of rows."""
    ours, found = pretrained.shape(name), incoming.shape(theirs)
    by_row = is_position_table(name) or is_vocabulary(name)
    return by_row and len(ours) == len(found) == 2 and ours != found and ours[1] == found[1]


class Cut(View):
    """A model whose embeddings have the pretrained number of rows: shared ones its own, the others pretrained."""

    def __init__(self, incoming: Checkpoint, pretrained: Checkpoint, cut: Mapping[str, str]) -> None:
        super().__init__(incoming)
        self._pretrained, self._cut = pretrained, dict(cut)

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        if name not in self._cut:
            return tensor
        whole = self._pretrained[self._cut[name]].to(tensor.dtype, copy=True)
        if not is_position_table(name):  # a row of another table stands for another place in the image
            shared = min(len(whole), len(tensor))
            whole[:shared] = tensor[:shared]
        return whole

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Checkpoint`."""
        return self._pretrained.shape(self._cut[name]) if name in self._cut else super().shape(name)
