"""Names of the files in an output."""

import re
from pathlib import Path

__all__ = [
    "CARD_FILE",
    "DIFFUSERS_STEM",
    "LEDGER_FILE",
    "MASTER_FILE",
    "MISTRAL_STEM",
    "OPEN_CLIP_STEM",
    "STATE_FILE",
    "WEIGHTS_STEM",
    "is_weights",
    "weights_stem",
]

STATE_FILE = "merge_state.json"
"""What the merge continues from; its presence says that the folder is whole."""

LEDGER_FILE = "merge_ledger.jsonl"
"""One line of strict JSON per fold."""

MASTER_FILE = "merge_master.safetensors"
"""The merged parameters in float32, whatever the dtype of the weights beside them."""

CARD_FILE = "README.md"
"""The model card."""

WEIGHTS_STEM = "model"
"""The weights, where transformers, timm and most other libraries look for them; without ending."""

OPEN_CLIP_STEM = "open_clip_model"
"""The weights, where open_clip looks for them; without ending."""

DIFFUSERS_STEM = "diffusion_pytorch_model"
"""The weights, where diffusers looks for those of one part of a pipeline; without ending."""

MISTRAL_STEM = "consolidated"
"""The weights, where mistral-inference looks for them; without ending."""

_STEMS = (WEIGHTS_STEM, OPEN_CLIP_STEM, DIFFUSERS_STEM, MISTRAL_STEM)


def weights_stem(name: str) -> str:
    """Stem of the file that takes the place of a base's weights, so that the base's library finds it.

    Pickles are replaced by safetensors of the stem that the same library reads, and variants (``.fp16.``) by the file
    that it reads when no variant is asked for.

    Args:
        name: of the file, or the index of shards, that the base's weights were read from.

    Example:
        >>> weights_stem("diffusion_pytorch_model.safetensors.index.json"), weights_stem("pytorch_model.bin")
        ('diffusion_pytorch_model', 'model')
        >>> weights_stem("open_clip_pytorch_model.bin"), weights_stem("diffusion_pytorch_model.fp16.safetensors")
        ('open_clip_model', 'diffusion_pytorch_model')
    """
    if name.startswith("open_clip_pytorch_model."):
        return OPEN_CLIP_STEM
    start = re.split(r"\.|-\d{5}-of-", name, maxsplit=1)[0]
    return start if start in _STEMS else WEIGHTS_STEM


def is_weights(path: Path) -> bool:
    """Whether a file is one that a merge writes weights into: whole, a shard, or an index of shards.

    Example:
        >>> [is_weights(Path(name)) for name in ("model-00001-of-00002.safetensors", "merge_master.safetensors", "a")]
        [True, True, False]
    """
    return any(
        path.match(f"{stem}{ending}")
        for stem in (*_STEMS, Path(MASTER_FILE).stem)
        for ending in (".safetensors", "-?????-of-?????.safetensors", ".safetensors.index.json")
    )
