"""Names of the files in an output."""

from pathlib import Path

__all__ = ["CARD_FILE", "LEDGER_FILE", "MASTER_FILE", "OPEN_CLIP_STEM", "STATE_FILE", "WEIGHTS_STEM", "is_weights"]

STATE_FILE = "merge_state.json"
"""What the merge continues from; its presence says that the folder is whole."""

LEDGER_FILE = "merge_ledger.jsonl"
"""One line of strict JSON per fold."""

MASTER_FILE = "merge_master.safetensors"
"""The merged parameters in float32, whatever the dtype of the weights beside them."""

CARD_FILE = "README.md"
"""The model card."""

WEIGHTS_STEM = "model"
"""The weights, where transformers and most other libraries look for them; without ending."""

OPEN_CLIP_STEM = "open_clip_model"
"""The weights, where open_clip looks for them; without ending."""


def is_weights(path: Path) -> bool:
    """Whether a file is one that a merge writes weights into: whole, a shard, or an index of shards.

    Example:
        >>> [is_weights(Path(name)) for name in ("model-00001-of-00002.safetensors", "merge_master.safetensors", "a")]
        [True, True, False]
    """
    return any(
        path.match(f"{stem}{ending}")
        for stem in (WEIGHTS_STEM, OPEN_CLIP_STEM, Path(MASTER_FILE).stem)
        for ending in (".safetensors", "-?????-of-?????.safetensors", ".safetensors.index.json")
    )
