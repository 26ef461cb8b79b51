"""Names of tensors in memory where these are not the names in the file, which transformers 5 gives many families.

Whoever trains on the module has its names (an adapter of peft), whoever reads the folder has the file's. Both are
brought to one spelling here, so that neither has to be known for what it is.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Spelling", "common_name", "spellings"]

_RENAMED = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # image-language models: LLaVA, Gemma 3, PaliGemma and their kin; Qwen2-VL and Qwen2.5-VL
        (r"^(?:model\.)?language_model\.(?:model\.)?lm_head\.", "lm_head."),
        (r"^(?:model\.language_model|language_model\.model|language_model)\.", "model."),
        (r"^model\.(?=\w*(?:vision|visual|image|audio|projector|connector|qformer))", ""),
        (r"(?:^|(?<=\.))vision_tower\.vision_model\.", "vision_tower."),
        # DINOv3
        (r"(?:^|(?<=\.))model\.(?=layer\.\d)", ""),
        # BEiT's table of relative positions, shared or of a block
        (r"encoder\.relative_position_bias\.", "shared_position_bias."),
        (r"attention\.attention\.relative_position_bias\.", "relative_position_bias."),
        # ViT, DeiT, BEiT, DINOv2 and Swin
        (
            r"attention\.self\.(?=relative_position_bias_table$|relative_position_index$)",
            "attention.relative_position_bias.",
        ),
        (r"attention\.(?:attention|self)\.(query|key|value)\.", lambda match: f"attention.{match[1][0]}_proj."),
        (r"attention\.output\.dense\.", "attention.o_proj."),
        (r"(?:^|(?<=\.))encoder\.layer\.(?=\d)", "layers."),
        (r"(?:^|(?<=\.))intermediate\.dense\.", "mlp.fc1."),
        (r"(?<=\d\.)output\.dense\.", "mlp.fc2."),
        (r"(?<=mlp\.)weights_out\.", "down_proj."),
        # Mixtral's router
        (r"(?<=\.)block_sparse_moe\.(?=gate\.)", "mlp."),
    )
]
"""Spellings of file and memory -> one for both, applied in this order."""

_CUT = re.compile(r"(?<=mlp\.)weights_in\.(?=weight$|bias$)")
"""DINOv2's gated feed-forward: fused in the file, two modules in memory."""


@dataclass(frozen=True)
class Spelling:
    """A tensor, or some rows of one, under the name that it shares with the module in memory.

    Attributes:
        name: the common name.
        parameter: name of the tensor that holds it.
        rows: first and last (exclusive) row of it; all if ``None``.
    """

    name: str
    parameter: str
    rows: tuple[int, int] | None = None


def common_name(name: str) -> str:
    """Spell a name in the way that file and memory have in common.

    Example:
        >>> common_name("vit.encoder.layer.0.attention.attention.query.weight")
        'vit.layers.0.attention.q_proj.weight'
        >>> common_name("model.language_model.norm.weight"), common_name("language_model.model.norm.weight")
        ('model.norm.weight', 'model.norm.weight')
    """
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def spellings(parameter: str, shape: Sequence[int]) -> list[Spelling]:
    """List what one tensor holds under common names: itself, or the modules that memory has for a fused one.

    Args:
        parameter: its name, in a file or in memory.
        shape: as stored.

    Example:
        >>> [(found.name, found.rows) for found in spellings("layer.0.mlp.weights_in.bias", (6,))]
        [('layer.0.mlp.gate_proj.bias', (0, 3)), ('layer.0.mlp.up_proj.bias', (3, 6))]
    """
    name = common_name(parameter)
    if not _CUT.search(name) or not shape or shape[0] % 2:
        return [Spelling(name, parameter)]
    half = shape[0] // 2
    return [
        Spelling(_CUT.sub(f"{part}.", name), parameter, rows)
        for part, rows in (("gate_proj", (0, half)), ("up_proj", (half, 2 * half)))
    ]
