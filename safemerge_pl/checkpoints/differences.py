"""Find what else an incoming model differs in: image size, vocabulary, settings, tokenizer, origin."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from torch import Tensor

from safemerge_pl.architectures.embeddings import is_position_table, is_vocabulary
from safemerge_pl.architectures.groups import is_head
from safemerge_pl.architectures.layers import MergeLayer
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

_GROWN = 3.0
"""Times that a matrix has to grow for a low cosine to come of training: what is added to it turns it by growing it."""


def differences(
    pretrained: Checkpoint, others: Mapping[str, str], incoming: Checkpoint, on_mismatch: Mismatch
) -> Iterator[str]:
    """Note tensors that are not merged and have another shape; refuse them if they tell of another image size.

    Raises:
        CheckpointError: if a table of positions has another length and ``on_mismatch`` is ``"error"``.
    """
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
    """Note settings that do not show in the weights: same names and shapes, another function."""
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
    """Note that embeddings are merged and the tokenizers differ: rows may stand for other words."""
    if pretrained.folder is None or incoming.folder is None or not any(map(is_vocabulary, parameters)):
        return
    for name in _TOKENIZERS:
        ours, theirs = pretrained.folder / name, incoming.folder / name
        if ours.exists() and theirs.exists() and ours.read_bytes() != theirs.read_bytes():
            yield f"its {name} is another one than the pretrained model's: do the rows of the embeddings match?"


def _is_telling(layer: MergeLayer) -> bool:
    """Whether a matrix of a fine-tune is like the pretrained one; a head may have been made anew."""
    return len(layer.shape) == 2 and min(layer.shape) > 1 and not is_head(layer.parameter)


class Likeness:
    """Cosines between the merged weights of two models: a fine-tune's are near one, a stranger's near zero.

    Every tensor is measured while it is read for another reason, and only lengths are kept: of the pretrained and of
    the incoming weights here; the fold adds those of their differences.

    Args:
        layers: what is merged; lengths are kept by their names.

    Attributes:
        lengths: Euclidean length of each layer that was taken in.

    Example:
        >>> import torch
        >>> layer = MergeLayer("model.0.up", "layers.0.mlp.fc1.weight", (2, 2))
        >>> likeness = Likeness([layer])
        >>> _ = likeness.add(layer.parameter, torch.tensor([[0.0, 3.0], [4.0, 0.0]]))
        >>> likeness.notes({"model.0.up": 5.0}, {"model.0.up": 1.0})  # a step of 1 away from weights of length 5
        ()
    """

    def __init__(self, layers: Iterable[MergeLayer]) -> None:
        self._layers: dict[str, list[MergeLayer]] = defaultdict(list)
        for layer in layers:
            self._layers[layer.parameter].append(layer)
        self.lengths: dict[str, float] = {}

    def add(self, parameter: str, tensor: Tensor) -> Tensor:
        """Take in a tensor that is read anyway, on any thread, and return it."""
        for layer in self._layers[parameter]:
            if layer.name not in self.lengths:
                parts = (part.float() for part in flat_parts(layer.view(tensor.detach())))
                self.lengths[layer.name] = math.sqrt(sum(float(part @ part) for part in parts))  # enough for a cosine
        return tensor

    def notes(self, pretrained: Mapping[str, float], distances: Mapping[str, float]) -> tuple[str, ...]:
        """Say so if the models, or some of their matrices, have nothing in common.

        Args:
            pretrained: length of each pretrained layer.
            distances: length of the difference of each layer.
        """
        layers = [layer for parts in self._layers.values() for layer in parts]
        products = {
            name: _product(pretrained[name], self.lengths[name], distances[name])
            for name in (each.name for each in layers)
        }
        norms = math.hypot(*pretrained.values()) * math.hypot(*self.lengths.values())
        if norms and (cosine := sum(products.values()) / norms) < _UNLIKE:
            return (
                f"its weights have a cosine of {cosine:.2f} with the pretrained model's: is it a fine-tune of this "
                "model?",
            )
        matrices = [layer.name for layer in layers if _is_telling(layer)]
        cosines = {name: products[name] / norm for name in matrices if (norm := pretrained[name] * self.lengths[name])}
        strange = [
            name for name in cosines if cosines[name] < _UNLIKE and self.lengths[name] < _GROWN * pretrained[name]
        ]
        if not strange:
            return ()
        return (
            f"{len(strange)} of its {len(matrices)} matrices have a cosine below {_UNLIKE} with the pretrained "
            f"model's, first {strange[0]} with {cosines[strange[0]]:.2f}: is it a fine-tune of this model, with rows "
            "in the same order?",
        )


def _product(a: float, b: float, distance: float) -> float:
    """Scalar product of two vectors from their lengths and that of their difference."""
    return (a * a + b * b - distance * distance) / 2


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
