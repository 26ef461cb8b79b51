"""Two orders of the rows of rotary queries and keys.

Rotary embeddings (Su et al. 2021, Sec. 3.2.2) turn pairs of entries of a head. Meta's and Mistral's own files keep the
two rows of a pair side by side; transformers keeps all first rows of a head before all second ones. Both are the same
network, each with its own rotation.
"""

import re
from collections.abc import Iterable

from torch import Tensor

from safemerge_pl.architectures.families import rules_by_name

__all__ = ["has_head_norms", "is_paired", "reorder"]

_HEAD_NORM = re.compile(r"\.[qk]_norm\.")


def is_paired(parameter: str) -> bool:
    """Whether a tensor is a matrix or bias of queries or keys whose rotary pairs lie side by side.

    Example:
        >>> names = ("layers.0.attention.wk.weight", "layers.0.attention.wv.weight", "layers.0.self_attn.k_proj.weight")
        >>> [is_paired(name) for name in names]
        [True, False, False]
    """
    return any(rule.paired for rule, _ in rules_by_name(re.sub(r"\.bias$", ".weight", parameter)))


def has_head_norms(names: Iterable[str]) -> bool:
    """Whether a model normalises queries or keys with weights of their own, which follow the same order.

    Example:
        >>> has_head_norms(["layers.0.self_attn.q_norm.weight"]), has_head_norms(["layers.0.input_layernorm.weight"])
        (True, False)
    """
    return any(_HEAD_NORM.search(name) for name in names)


def reorder(tensor: Tensor, size: int, *, to_pairs: bool) -> Tensor:
    """Put the rows of every head in the other order; the values stay as they are.

    Args:
        tensor: matrix ``(heads * size, d_in)`` or bias ``(heads * size,)``, upright.
        size: rows of a head, an even number that divides those of the tensor.
        to_pairs: from halves to pairs; else from pairs to halves.

    Returns:
        A tensor of the same shape.

    Example:
        >>> import torch
        >>> reorder(torch.arange(8), 4, to_pairs=True).tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
        >>> reorder(torch.tensor([0, 2, 1, 3]), 4, to_pairs=False).tolist()
        [0, 1, 2, 3]
    """
    halves = (2, size // 2) if to_pairs else (size // 2, 2)
    return tensor.reshape(-1, *halves, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
