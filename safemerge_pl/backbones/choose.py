"""The backbone that runs a model which is named as a folder or hub id."""

import json
from pathlib import Path
from typing import Any

from safemerge_pl.backbones.base import Backbone
from safemerge_pl.backbones.clip import CLIPBackbone
from safemerge_pl.backbones.open_clip import OpenCLIPBackbone
from safemerge_pl.backbones.t5 import T5Backbone
from safemerge_pl.checkpoints.open import CheckpointError, open_checkpoint

__all__ = ["choose_backbone"]

_KINDS: dict[str | None, type[CLIPBackbone | T5Backbone]] = {"clip": CLIPBackbone, "t5": T5Backbone}
"""By the ``model_type`` of transformers' configuration."""


def choose_backbone(pretrained: str) -> Backbone:
    """Choose the backbone that runs a model, by what its folder says; nothing is loaded yet.

    Args:
        pretrained: folder or hub id.

    Raises:
        CheckpointError: for a file by itself, and a model of another kind.

    Example:
        >>> from safemerge_pl.zoo import FILES
        >>> type(choose_backbone(str(FILES / "model"))).__name__
        'CLIPBackbone'
    """
    folder = open_checkpoint(pretrained).folder
    if folder is None:
        raise CheckpointError(f"{pretrained} is a file by itself, which cannot be run; give the folder of the model.")
    if (folder / "open_clip_config.json").is_file():
        return OpenCLIPBackbone(pretrained=str(folder))
    kind = _model_type(folder)
    if kind not in _KINDS:
        found = "it has no configuration" if kind is None else f"it is a {kind}"
        raise CheckpointError(
            f"{folder} cannot be run here ({found}): whole CLIP and T5 models of transformers can, and folders of "
            "open_clip."
        )
    return _KINDS[kind](str(folder))


def _model_type(folder: Path) -> str | None:
    """What kind of model transformers takes it for; ``None`` if the folder does not say."""
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    kind = config.get("model_type") if isinstance(config, dict) else None
    return kind if isinstance(kind, str) else None
