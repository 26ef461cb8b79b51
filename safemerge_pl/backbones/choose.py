"""The backbone that runs a model which is named as a folder or hub id."""

from safemerge_pl.backbones.base import Backbone
from safemerge_pl.backbones.clip import CLIPBackbone
from safemerge_pl.backbones.open_clip import OpenCLIPBackbone
from safemerge_pl.backbones.t5 import T5Backbone
from safemerge_pl.checkpoints.open import CheckpointError, open_checkpoint
from safemerge_pl.runtime.files import read_object

__all__ = ["choose_backbone"]

_KINDS: dict[str, type[CLIPBackbone | T5Backbone]] = {"clip": CLIPBackbone, "t5": T5Backbone}
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
    kind = read_object(folder / "config.json").get("model_type")
    if not isinstance(kind, str) or kind not in _KINDS:
        found = f"it is a {kind}" if isinstance(kind, str) else "it has no configuration"
        raise CheckpointError(
            f"{folder} cannot be run here ({found}): whole CLIP and T5 models of transformers can, and folders of "
            "open_clip."
        )
    return _KINDS[kind](str(folder))
