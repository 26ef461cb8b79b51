"""What families of models call their towers, blocks and matrices, and how they store these.

A further family takes rules here, and nothing elsewhere but a name in ``embeddings`` if it calls a table by a new one.

A pattern has the groups that its canonical names are made of: ``i``, the block; ``k``, the part; ``e``, the expert.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from safemerge_pl.architectures.embeddings import is_embedding

__all__ = [
    "OTHER_PIECES",
    "OUT_PROJECTIONS",
    "WRAPPERS",
    "Rule",
    "block_of",
    "has_fused_experts",
    "in_text",
    "in_vision",
    "is_known",
    "rules_by_name",
    "tower",
    "unknown_fusion",
]

OUT_PROJECTIONS = ("out_proj", "o_proj", "out_lin", "proj", "projection", "dense", "output.dense", "Wo", "wo")
"""What an attention calls the matrix behind its heads."""

_BLOCK = (  # Swin has blocks in layers; torchvision calls its blocks encoder_layer_3, and those of Swin features.1.0
    r"(?:(?:layers|layer|blocks|resblocks|block|h|features)\.|encoder_layer_)"
    r"(?P<i>(?<=features\.)\d+\.\d+(?=\.(?:attn|mlp|norm))|(?<!features\.)\d+(?:\.blocks\.\d+)?)\."
)
_TORCHVISION = r"(?:encoder_layer_|features\.)(?P<i>(?<=features\.)\d+\.\d+|(?<=layer_)\d+)\."
_ATTENTION = r"(?:self_attn|self_attention|attn|attention)\.(?:(?:self|attention)\.)?"
_CROSS = r"(?:encoder_attn|cross_attn|crossattention|multihead_attn)\.(?:self\.)?"
_LINEAR = r"linear_attn\."  # attention without a softmax over positions: three layers of four in Qwen3.5 and its kin
_FEED = r"(?:mlp|ffn|feed_forward)\."
_MIXTURE_OF = r"(?:mlp|block_sparse_moe|feed_forward)\."
_MIXTURE = _MIXTURE_OF + r"experts\.(?P<e>\d+)\."
_QKV = r"(?P<k>q|k|v|query|key|value)(?:_proj|_lin)?\.weight"
_OUT = r"(?:" + "|".join(map(re.escape, OUT_PROJECTIONS)) + r")\.weight"
_T5 = r"(?P<side>encoder|decoder)\.block\.(?P<i>\d+)\.layer\.\d+\."


@dataclass(frozen=True)
class Rule:
    """One kind of parameter.

    Attributes:
        pattern: of its name.
        names: canonical name of each block of output rows in it.
        transposed: stored as ``(d_in, d_out)``.
        wide: a matrix of the feed-forward's output side, merged on demand only.
        heads: queries first, then keys and values of as many heads or fewer (grouped-query attention).
        square: of these, one with as many rows of queries as it has columns.
        values: queries and keys of equal height, then values of as many rows as the output projection has columns.
        paired: queries or keys whose rotary pairs lie side by side, not in halves of a head as transformers has them.
    """

    pattern: re.Pattern[str]
    names: tuple[str, ...]
    transposed: bool = False
    wide: bool = False
    heads: bool = False
    square: bool = False
    values: bool = False
    paired: bool = False


def _rule(pattern: str, *names: str, **kind: bool) -> Rule:
    return Rule(re.compile(r"(?:^|\.)" + pattern + r"$"), names, **kind)


def _fused(*parts: str) -> tuple[str, ...]:
    return tuple("{tower}.{i}." + part for part in parts)


_RULES = (
    # T5: self- and cross-attention, and every input side of the (gated) feed-forward
    _rule(_T5 + r"SelfAttention\.(?P<k>[qkvo])\.weight", "{side}.{i}.self.{k}"),
    _rule(_T5 + r"EncDecAttention\.(?P<k>[qkvo])\.weight", "{side}.{i}.cross.{k}"),
    _rule(_T5 + r"DenseReluDense\.(?P<k>wi|wi_0|wi_1)\.weight", "{side}.{i}.{k}"),
    _rule(_T5 + r"DenseReluDense\.wo\.weight", "{side}.{i}.wo", wide=True),  # which SAFE-Merge leaves pretrained
    # GPT-2: Conv1D stores weights as (d_in, d_out); others store the same names upright
    _rule(r"h\.(?P<i>\d+)\.attn\.c_attn\.weight", *_fused("q", "k", "v"), transposed=True),
    _rule(r"h\.(?P<i>\d+)\.attn\.c_proj\.weight", "{tower}.{i}.out", transposed=True),
    _rule(r"h\.(?P<i>\d+)\.attn\.c_proj\.weight", "{tower}.{i}.out"),
    _rule(r"h\.(?P<i>\d+)\.mlp\.c_fc\.weight", "{tower}.{i}.up", transposed=True),
    _rule(r"h\.(?P<i>\d+)\.mlp\.c_proj\.weight", "{tower}.{i}.down", transposed=True, wide=True),
    # attention of CLIP, SigLIP, Llama and its kin, Phi, BERT and its kin, ViT, DINO, Swin, Whisper, BART, GPT-J, timm
    _rule(_BLOCK + _ATTENTION + _QKV, "{tower}.{i}.{k[0]}"),
    _rule(_BLOCK + _ATTENTION + r"w(?P<k>[qk])\.weight", "{tower}.{i}.{k}", paired=True),  # Meta's and Mistral's own
    _rule(_BLOCK + _ATTENTION + r"w(?P<k>v)\.weight", "{tower}.{i}.{k}"),
    _rule(_BLOCK + _ATTENTION + r"(?P<k>q_a|q_b|kv_b)_proj\.weight", "{tower}.{i}.{k}"),  # DeepSeek's latent attention
    _rule(_BLOCK + _ATTENTION + r"kv_a_proj_with_mqa\.weight", "{tower}.{i}.kv_a"),
    _rule(_BLOCK + _ATTENTION + _OUT, "{tower}.{i}.out"),
    _rule(_BLOCK + _CROSS + _QKV, "{tower}.{i}.cross.{k[0]}"),
    _rule(_BLOCK + _CROSS + _OUT, "{tower}.{i}.cross.out"),
    # q, k and v fused: open_clip and nn.MultiheadAttention; timm and BLIP; ModernBERT and MPT; Phi-3
    _rule(_BLOCK + _ATTENTION + r"in_proj_weight", *_fused("q", "k", "v")),
    _rule(_BLOCK + _CROSS + r"in_proj_weight", *_fused("cross.q", "cross.k", "cross.v")),
    _rule(_BLOCK + _ATTENTION + r"(?:qkv|Wqkv)\.weight", *_fused("q", "k", "v"), heads=True),
    _rule(r"layers\.(?P<i>\d+)\.self_attn\.qkv_proj\.weight", *_fused("q", "k", "v"), heads=True, square=True),
    # linear attention; what Qwen3-Next fuses head by head (in_proj_qkvz) is not cut
    _rule(_BLOCK + _LINEAR + r"(?P<k>[qkv])_proj\.weight", "{tower}.{i}.linear.{k}"),
    _rule(_BLOCK + _LINEAR + r"(?:out|o)_proj\.weight", "{tower}.{i}.linear.out"),
    _rule(_BLOCK + _LINEAR + r"(?:in_proj_z|g_proj)\.weight", "{tower}.{i}.linear.gate"),
    _rule(_BLOCK + _LINEAR + r"in_proj_qkv\.weight", *_fused("linear.q", "linear.k", "linear.v"), values=True),
    # input side of the feed-forward
    _rule(_BLOCK + r"(?:" + _FEED + r")?(?:fc1|linear1|linear_fc1)\.weight", "{tower}.{i}.up"),
    _rule(_BLOCK + _FEED + r"(?:c_fc|fc_in|lin1|intermediate_dense|dense_h_to_4h|fc1_x)\.weight", "{tower}.{i}.up"),
    _rule(_BLOCK + r"intermediate\.dense\.weight", "{tower}.{i}.up"),
    _rule(_TORCHVISION + r"mlp\.(?:0|linear_1)\.weight", "{tower}.{i}.up"),
    _rule(_BLOCK + _FEED + r"(?P<k>gate|up)_proj\.weight", "{tower}.{i}.{k}"),
    _rule(_BLOCK + _FEED + r"fc1_g\.weight", "{tower}.{i}.gate"),
    _rule(_BLOCK + r"feed_forward\.w1\.weight", "{tower}.{i}.gate"),
    _rule(_BLOCK + r"feed_forward\.w3\.weight", "{tower}.{i}.up"),
    _rule(_BLOCK + _FEED + r"(?:gate_up_proj|w12|weights_in)\.weight", *_fused("gate", "up")),
    _rule(_BLOCK + r"mlp\.Wi\.weight", *_fused("up", "gate")),
    # mixtures of experts, each a feed-forward
    _rule(_BLOCK + _MIXTURE + r"(?P<k>gate|up)_proj\.weight", "{tower}.{i}.expert{e}.{k}"),
    _rule(_BLOCK + _MIXTURE + r"w1\.weight", "{tower}.{i}.expert{e}.gate"),
    _rule(_BLOCK + _MIXTURE + r"w3\.weight", "{tower}.{i}.expert{e}.up"),
    _rule(_BLOCK + r"mlp\.shared_experts?\.(?P<k>gate|up)_proj\.weight", "{tower}.{i}.shared.{k}"),
)

OTHER_PIECES = [
    (re.compile(r"(?:^|\.)(?:" + pattern + r")$"), names)
    for pattern, *names in (
        # CLIP's vision tower in transformers, open_clip and timm
        (r"embeddings\.class_embedding|visual\.class_embedding|cls_token", "class"),
        (r"embeddings\.patch_embedding\.weight|visual\.conv1\.weight|patch_embed\.proj\.weight", "patch"),
        (r"embeddings\.position_embedding\.weight|visual\.positional_embedding|pos_embed", "position"),
        (r"(?:pre_layrnorm|visual\.ln_pre|norm_pre)\.(?:weight|bias)", "pre.{end}"),
        (r"(?:post_layernorm|visual\.ln_post|norm)\.(?:weight|bias)", "post.{end}"),
        (
            r"(?:layers\.\d+\.layer_norm|resblocks\.\d+\.ln_|blocks\.\d+\.norm)([12])\.(?:weight|bias)",
            "{block}.norm{group}.{end}",
        ),
        (r"layers\.\d+\.(?:self_attn\.|attention\.w)([qkv])(?:_proj)?\.bias", "{block}.{group}.bias"),
        (
            r"resblocks\.\d+\.attn\.in_proj_bias|blocks\.\d+\.attn\.qkv\.bias",
            "{block}.q.bias",
            "{block}.k.bias",
            "{block}.v.bias",
        ),
        (
            r"(?:layers\.\d+\.self_attn\.out_proj|resblocks\.\d+\.attn\.out_proj|blocks\.\d+\.attn\.proj)\.bias",
            "{block}.out.bias",
        ),
        (r"(?:layers\.\d+\.mlp\.fc1|resblocks\.\d+\.mlp\.c_fc|blocks\.\d+\.mlp\.fc1)\.bias", "{block}.up.bias"),
        (
            r"(?:layers\.\d+\.mlp\.fc2|resblocks\.\d+\.mlp\.c_proj|blocks\.\d+\.mlp\.fc2)\.(?:weight|bias)",
            "{block}.down.{end}",
        ),
        # Llama, Mistral and Mixtral in transformers and in their makers' own files
        (r"(?:embed_tokens|tok_embeddings)\.weight", "words"),
        (r"(?:lm_head|output)\.weight", "head"),
        (r"layers\.\d+\.(?:input_layernorm|attention_norm)\.weight", "{block}.norm1.{end}"),
        (r"layers\.\d+\.(?:post_attention_layernorm|ffn_norm)\.weight", "{block}.norm2.{end}"),
        (r"layers\.\d+\.(?:self_attn\.o_proj|attention\.wo)\.bias", "{block}.out.bias"),
        (r"layers\.\d+\.(?:mlp\.down_proj|feed_forward\.w2)\.weight", "{block}.down.{end}"),
        (_MIXTURE_OF + r"gate\.weight", "{block}.router.{end}"),
        (_MIXTURE_OF + r"experts\.(\d+)\.(?:down_proj|w2)\.weight", "{block}.expert{group}.down.{end}"),
    )
]
"""What a model holds beside the matrices of the rules, under canonical names that do not depend on the library.

In a name, ``block`` is the number of the block, ``end`` the last part of the tensor's name, ``group`` the group of the
pattern. A tensor with several names is made of as many equal parts.
"""

_IN_BLOCK = re.compile(r"(?:^|\.)" + _BLOCK)

_VISION = re.compile(r"(?:^|\.)(?:vision_model|visual)\.")

_TEXT = re.compile(r"(?:^|\.)(?:text|text_model|resblocks)\.")
"""The text side of a contrastive model, in transformers and open_clip, where the name is not one of a vision tower."""

WRAPPERS = frozenset({"vision_model", "visual", "image_encoder", "model", "backbone", "base_model", "transformer"})
"""First parts of a name that some libraries and training scripts leave out. Any other one tells towers apart."""

_FUSION = re.compile(r"(?:(?<!linear_attn\.in_proj_)qkv(?:_proj)?|query_key_value|[Ww]qkv|c_attn|attn\.attn)\.weight$")

_LEFT = re.compile(
    r"(?:fc2|linear2|linear_fc2|lin2|fc_out|down_proj|c_proj|w2|mlp\.w3|wo|Wo|weights_out|output\.dense|output_dense"
    r"|dense_4h_to_h|downsample\.reduction|linear_2|(?:encoder_layer_\d+|features\.\d+\.\d+)\.mlp\.3)\.weight$"
)
"""Matrices left pretrained on purpose: the output side of the feed-forward, and those between two stages."""

_FUSED_EXPERTS = re.compile(r"(?:^|\.)experts\.(?:gate_up_proj|down_proj|up_proj|gate_proj)$")

_NO_MATRIX = re.compile(r"norm|bias|conv|cpb_mlp|router|(?:^|[._])gate\.weight$")
"""2-D tensors of a block that choose or normalise; those that are looked up are embeddings."""


@functools.lru_cache(2**16)  # a large mixture of experts has tens of thousands of names, each looked up several times
def rules_by_name(parameter: str) -> list[tuple[Rule, dict[str, str]]]:
    """Find the rules that a name falls under, with the groups of the name; shapes decide among them.

    Example:
        >>> [groups for _, groups in rules_by_name("vit.encoder.layer.3.attention.attention.query.weight")]
        [{'i': '3', 'k': 'query'}]
    """
    found = ((rule, rule.pattern.search(parameter)) for rule in _RULES)
    return [(rule, match.groupdict()) for rule, match in found if match]


def block_of(parameter: str) -> re.Match[str] | None:
    """Find where a name says which block it belongs to (group ``i``); ``None`` outside of blocks.

    Example:
        >>> block_of("visual.transformer.resblocks.3.ln_1.bias")["i"], block_of("visual.ln_pre.bias")
        ('3', None)
    """
    return _IN_BLOCK.search(parameter)


def is_known(parameter: str, shape: Sequence[int]) -> bool:
    """Whether it is known what a block's tensor is: merged, left pretrained on purpose, or no matrix at all.

    Example:
        >>> is_known("h.0.mlp.fc_out.weight", (8, 32)), is_known("layers.0.mixer.in_proj.weight", (64, 8))
        (True, False)
    """
    if len(shape) < 2 or min(shape) == 1 or is_embedding(parameter):
        return True
    if _NO_MATRIX.search(parameter) or _LEFT.search(parameter):
        return True
    return len(shape) == 2 and bool(rules_by_name(parameter))


def unknown_fusion(parameter: str) -> bool:
    """Whether a block's matrix holds q, k and v in an order that cannot be told from its name.

    Example:
        >>> unknown_fusion("gpt_neox.layers.0.attention.query_key_value.weight")
        True
    """
    return bool(block_of(parameter) and _FUSION.search(parameter))


def has_fused_experts(parameter: str) -> bool:
    """Whether a tensor holds matrices of all experts of a block, as transformers 5 has them in memory.

    Example:
        >>> [has_fused_experts(f"layers.0.mlp.experts.{name}") for name in ("gate_up_proj", "0.up_proj.weight")]
        [True, False]
    """
    return bool(_FUSED_EXPERTS.search(parameter))


def in_vision(parameter: str) -> bool:
    """Whether a name itself says that it belongs to a vision tower.

    Example:
        >>> in_vision("clip.vision_model.embeddings.class_embedding"), in_vision("encoder.layers.0.mlp.fc1.weight")
        (True, False)
    """
    return bool(_VISION.search(parameter))


def in_text(parameter: str) -> bool:
    """Whether a name that is not of a vision tower belongs to the text side of a contrastive model.

    Example:
        >>> in_text("text_model.encoder.layers.0.mlp.fc1.weight"), in_text("model.layers.0.mlp.up_proj.weight")
        (True, False)
    """
    return bool(_TEXT.search(parameter))


def tower(parameter: str) -> str:
    """Name a parameter's tower as in every library: ``vision``, ``text``, ``decoder`` or ``model``.

    A bare tower (``encoder.layers...`` of transformers 5) counts as vision: text towers alone are never merged.

    Example:
        >>> tower("encoder.layers.0.mlp.fc1.weight"), tower("model.decoder.layers.0.fc1.weight"), tower("h.0.ln_1.bias")
        ('vision', 'decoder', 'model')
    """
    if re.search(r"(?:^|\.)text_model\.", parameter):
        return "text"
    if in_vision(parameter):
        return "vision"
    if re.search(r"(?:^|\.)(?:encoder\.layer|transformer\.blocks|h)\.", parameter):
        return "model"
    if re.search(r"(?:^|\.)decoder\.", parameter):
        return "decoder"
    return "vision" if re.search(r"(?:^|\.)(?:encoder|blocks|resblocks)\.", parameter) else "model"
