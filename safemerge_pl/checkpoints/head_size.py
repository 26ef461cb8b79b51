"""How many rows a head has, from the settings beside a model or its own rotary frequencies."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from safemerge_pl.architectures.rotary import has_head_norms, is_paired
from safemerge_pl.checkpoints.refusals import read_config
from safemerge_pl.checkpoints.tensors import Checkpoint
from safemerge_pl.errors import CheckpointError
from safemerge_pl.runtime.files import local_path, read_object

__all__ = ["rotary_size"]

_PROJECTION = re.compile(r"attn\.[qk]_proj\.(?:weight|bias)$")

_HALVES = {"llama", "mistral", "mixtral", "ministral", "ministral3"}
"""Model types of transformers that keep rotary rows in halves and were converted from their makers' files."""

_FREQUENCIES = re.compile(r"(?:^|\.)(?:rope\.freqs|rotary_emb\.inv_freq)$")
"""What Llama's makers and earlier versions of transformers keep beside the weights: one number per pair of rows."""


def rotary_size(ours: Checkpoint, mine: str, theirs: Checkpoint, its: str) -> int:
    """Find how many rows a head has, to bring queries or keys from one order of rotary pairs into the other.

    Args:
        ours: a model.
        mine: its matrix or bias.
        theirs: a model whose rows may stand in the other order, or an adapter.
        its: the same matrix or bias there.

    Returns:
        An even number that divides the matrix's rows; 0 if both have one order.

    Raises:
        CheckpointError: naming both tensors, if it is not known, or not whether this is the same network.

    Example:
        >>> import torch
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> own, other = "layers.0.attention.wq.weight", "layers.0.self_attn.q_proj.weight"
        >>> meta = Memory({own: torch.ones(8, 8), "rope.freqs": torch.ones(2)}, "a file")
        >>> rotary_size(Memory({other: torch.ones(8, 8)}, "a folder"), other, meta, own)
        4
    """
    if (_PROJECTION.search(mine) or _PROJECTION.search(its)) and _is_torchtune(ours) != _is_torchtune(theirs):
        raise CheckpointError(
            f"{theirs.source} holds `{its}` for the pretrained model's `{mine}`: torchtune keeps the rows of a head in "
            "the order of `wq`, `wk` in some models and in transformers' in others, under the same names; save the "
            "model by torchtune's checkpointer for transformers."
        )
    if is_paired(mine) == is_paired(its):
        return 0
    settings = [_settings(model) for model in (ours, theirs)]
    sizes = {size for model, each in zip((ours, theirs), settings, strict=True) for size in _sizes(model, each)}
    size = next(iter(sizes), 0)
    reason = next((found for found in (_obstacle(each) for each in settings) if found), "")
    if "vision" in mine + its:
        reason = "the heads of a vision tower are not known here"
    elif has_head_norms((*ours, *theirs)):
        reason = "a norm of the heads has weights in one of these orders"
    elif not reason and len(sizes) > 1:
        reason = f"their settings contradict each other about the rows of a head ({sorted(sizes)})"
    elif not reason and not size:
        reason = "no config.json or params.json beside them tells how many heads there are"
    elif not reason and (size % 2 or ours.shape(mine)[0] % size):
        reason = f"heads of {size} rows, as their settings say, do not fit {ours.shape(mine)[0]} rows"
    if reason:
        raise CheckpointError(
            f"{theirs.source} holds `{its}` for the pretrained model's `{mine}`: in the makers' layout (`wq`, `wk`) "
            f"the rows of a head lie in another order than in transformers', and {reason}; save both by one library."
        )
    return size


def _is_torchtune(model: Checkpoint) -> bool:
    return any(name.endswith(".attn.output_proj.weight") for name in model)


def _obstacle(settings: Mapping[str, Any]) -> str:
    """Why a model of these settings is not known to differ from the other one by the order of rows alone."""
    kind, rope = settings.get("model_type"), settings.get("rope_parameters")
    if kind is not None and kind not in _HALVES:
        return f"whether a model of type {kind} has these orders is not known"
    parts = [settings.get("partial_rotary_factor"), rope.get("partial_rotary_factor") if isinstance(rope, dict) else 1]
    if any(part not in (None, 1) for part in parts):
        return "only a part of each head is rotary"
    return ""


def _sizes(model: Checkpoint, settings: Mapping[str, Any]) -> Iterator[int]:
    """Rows of a head by each source that tells: transformers' settings or the makers', and rotary frequencies."""
    head, width = settings.get("head_dim"), settings.get("hidden_size", settings.get("dim"))
    heads = settings.get("num_attention_heads", settings.get("n_heads"))
    if type(head) is int and head > 0:  # True is an int too
        yield head
    elif type(width) is type(heads) is int and heads > 0 and width % heads == 0:
        yield width // heads
    yield from (2 * model.shape(name)[0] for name in model if _FREQUENCIES.search(name) and model.shape(name))


def _settings(model: Checkpoint) -> Mapping[str, Any]:
    """Those of the language model: as a module in memory has them, or of the folder that the weights lie in."""
    folder = model.folder
    if folder is None and local_path(model.source).is_file():
        folder = local_path(model.source).parent
    found = dict(model.config) or read_config(folder) or (read_object(folder / "params.json") if folder else {})
    inner = found.get("text_config")
    return inner if isinstance(inner, dict) else found
