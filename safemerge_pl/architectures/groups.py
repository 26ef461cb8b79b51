"""The groups that a model's tensors fall into, by their names, and what becomes of each: what a report adds up."""

import math
import re
from collections.abc import Iterable, Mapping

from safemerge_pl.architectures.embeddings import is_embedding
from safemerge_pl.architectures.families import OUT_PROJECTIONS, block_of

__all__ = ["FATES", "FEED_IN", "GROUPS", "add_fates", "group_of", "is_head"]

GROUPS = (
    "attention in",
    "attention out",
    "feed-forward in",
    "feed-forward out",
    "embeddings",
    "norms and biases",
    "head",
    "other",
)
"""In the order of a model, more or less; every tensor is in one."""

FATES = {"merged": "merged", "masked": "masked away", "recovered": "recovered", "pretrained": "left pretrained"}
"""What becomes of a part of a task vector, and how it is called."""

FEED_IN = "feed-forward in"
"""The group of the matrices that widen: a block's largest, which every family has."""

_HEAD = re.compile(
    r"(?:^|\.)(?:lm_head|embed_out|classifier|classification_head|score|heads?|head_dist|fc|qa_outputs|output_projection"
    r"|cls|pooler|visual_projection|text_projection|proj)(?:\.|$)"
)
_NORM = re.compile(r"norm|(?:^|[._])ln(?:_|\d|\.|$)|layrnorm|(?:^|[._])bn\d*\.", re.IGNORECASE)
_BIAS = re.compile(r"(?:^|[._])(?:bias|gamma|beta)$")
_EMBEDDED = re.compile(r"(?:^|\.)(?:cls_token|mask_token|register_tokens|(?:visual\.)?conv1\.weight|patch_embed.*)$")
_ATTENTION = re.compile(r"att|qkv|(?:^|\.)[qkv](?:_proj|_lin)?\.", re.IGNORECASE)
_OUT = re.compile(r"(?:^|\.)(?:" + "|".join(map(re.escape, (*OUT_PROJECTIONS, "c_proj", "o"))) + r")\.(?:weight|bias)$")
_FEED = re.compile(
    r"mlp|ffn|feed_forward|DenseReluDense|experts|(?:^|\.)(?:fc_?\w*|lin\w*|w[123]|wi\w*|wo|intermediate|output)\."
)
_FEED_OUT = re.compile(
    r"(?:fc2|linear2|linear_fc2|lin2|fc_out|down_proj|c_proj|w2|wo|weights_out|output\.dense|output_dense|dense_4h_to_h)"
    r"(?:\.weight)?$"
)


def is_head(name: str) -> bool:
    """Whether a tensor lies behind the last block: what a model is trained to answer with.

    Example:
        >>> [is_head(name) for name in ("lm_head.weight", "classifier.bias", "blocks.0.attn.proj.weight", "fc1.weight")]
        [True, True, False, False]
    """
    return block_of(name) is None and not is_embedding(name) and _HEAD.search(name) is not None


def add_fates(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up what became of several parts of a task vector.

    Args:
        parts: a share by each of :data:`FATES`; what else is in them is passed over.

    Example:
        >>> part = dict.fromkeys(FATES, 0.25)
        >>> add_fates([part, part])
        {'merged': 0.5, 'masked': 0.5, 'recovered': 0.5, 'pretrained': 0.5}
    """
    known = list(parts)
    return {fate: math.fsum(part[fate] for part in known) for fate in FATES}


def group_of(name: str) -> str:
    """The group of :data:`GROUPS` that a tensor belongs to.

    Example:
        >>> layer = "model.layers.0."
        >>> [group_of(layer + name) for name in ("self_attn.k_proj.weight", "self_attn.o_proj.weight")]
        ['attention in', 'attention out']
        >>> [group_of(layer + name) for name in ("mlp.up_proj.weight", "mlp.down_proj.weight", "mlp.up_proj.bias")]
        ['feed-forward in', 'feed-forward out', 'norms and biases']
        >>> [group_of(name) for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "gate")]
        ['embeddings', 'norms and biases', 'head', 'other']
    """
    if is_head(name):
        return "head"
    if is_embedding(name) or _EMBEDDED.search(name):
        return "embeddings"
    if _BIAS.search(name) or _NORM.search(name):
        return "norms and biases"
    if _ATTENTION.search(name):
        return "attention out" if _OUT.search(name) else "attention in"
    if _FEED.search(name):
        return "feed-forward out" if _FEED_OUT.search(name) else FEED_IN
    return "other"
