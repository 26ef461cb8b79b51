"""CLIP of open_clip: its tokenizer, preprocessing and text tower; the vision tower is merged."""

import hashlib
import json
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from safemerge_pl.backbones.base import Backbone, backbone_spec, refuse_foreign_code, without_foreign_code
from safemerge_pl.backbones.noise import noise_like
from safemerge_pl.checkpoints.open import CheckpointError, fingerprint
from safemerge_pl.runtime.files import local_path

__all__ = ["OpenCLIPBackbone"]

_CONFIG = "open_clip_config.json"


class OpenCLIPBackbone(Backbone):
    """A model of open_clip: the vision tower is merged, everything else stays pretrained.

    The vision tower of open_clip holds the projection of the image features as well, so methods that merge all
    parameters merge it, too. The merged folder is loaded by ``open_clip.create_model("local-dir:FOLDER")``.

    Args:
        model: name of the architecture. Weights of OpenAI need one that ends in ``-quickgelu``.
        pretrained: a folder with ``open_clip_config.json`` and weights (then ``model`` is not used), a weight file, or
            a tag of open_clip, which is fetched from the hub unless it is in its cache.

    Example:
        >>> OpenCLIPBackbone("ViT-B-32-quickgelu", "openai").spec()["init_args"]
        {'model': 'ViT-B-32-quickgelu', 'pretrained': 'openai'}
    """

    merged_attr = "visual"

    def __init__(self, model: str = "ViT-B-32-quickgelu", pretrained: str = "openai") -> None:
        super().__init__()
        self.model, self.pretrained = model, str(pretrained)
        self._place: Path | None = None
        self._text: dict[str, Any] = {}  # a plain dict: the text side is no part of the module's state

    def spec(self) -> dict[str, Any]:
        """See :class:`Backbone`."""
        return backbone_spec(self, model=self.model, pretrained=self.pretrained)

    def folder(self) -> Path:
        """See :class:`Backbone`; for a file or tag a temporary folder that links to the weights."""
        if self._place is None:
            path = local_path(self.pretrained)
            if not path.is_dir():
                path = Path(tempfile.mkdtemp(prefix="safemerge-open-clip-"))
                weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
                _fill(path, self.model, self.pretrained)
            elif not (path / _CONFIG).is_file():
                raise CheckpointError(f"{path} has no {_CONFIG}; give a folder that open_clip wrote, or a file.")
            self._place = path
        return self._place

    def load(self) -> None:
        """See :class:`Backbone`."""
        if hasattr(self, "visual"):
            return
        import open_clip

        folder = self.folder()
        local = local_path(self.pretrained).is_dir()
        refuse_foreign_code(folder)
        try:
            with without_foreign_code():
                model = open_clip.create_model(f"local-dir:{folder}", precision="fp32", require_pretrained=True)
                tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}" if local else self.model)
        except (OSError, RuntimeError, ValueError, TypeError, KeyError, pickle.UnpicklingError) as error:
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{self.pretrained} is no model that open_clip can load: {reason}") from error
        model.eval()
        self._text = {"model": model, "tokenizer": tokenizer}
        self.visual = model.visual
        self.eval()

    def preprocess(self, images: Sequence[Any]) -> Tensor:
        """See :class:`Backbone`."""
        return self.preprocessor()(images)

    def preprocessor(self) -> Callable[[Sequence[Any]], Tensor]:
        """See :class:`Backbone`."""
        self.load()
        return _Transform(self.visual.preprocess_cfg)

    def text_key(self) -> str | None:
        """See :class:`Backbone`; weights and configuration of all but the vision tower, and the tokenizer."""
        if "key" not in self._text:
            import open_clip

            state = self._text["model"].state_dict()
            weights = fingerprint({name: state[name] for name in state if not name.startswith("visual.")})
            config = json.loads((self.folder() / _CONFIG).read_text())["model_cfg"]
            parts = [weights, config.get("text_cfg"), config.get("quick_gelu"), type(self._text["tokenizer"]).__name__]
            content = json.dumps([*parts, open_clip.__version__], sort_keys=True)
            self._text["key"] = hashlib.sha256(content.encode()).hexdigest()
        key: str = self._text["key"]
        return key

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """See :class:`Backbone`."""
        features: Tensor = self._text["model"].encode_text(self._text["tokenizer"](list(texts)))
        return features

    def noise(self, count: int) -> Tensor:
        """See :class:`Backbone`; pictures."""
        return noise_like(self.preprocess, count)

    def forward(self, pixels: Tensor) -> Tensor:
        """See :class:`Backbone`."""
        features: Tensor = self.visual(pixels)
        return features


class _Transform:
    """open_clip's preprocessing; small, so that worker processes get it without the model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from open_clip.transform import PreprocessCfg, image_transform_v2

        self._transform = image_transform_v2(PreprocessCfg(**settings), is_train=False)

    def __call__(self, images: Sequence[Any]) -> Tensor:
        return torch.stack([self._transform(image) for image in images])


def _fill(folder: Path, model: str, pretrained: str) -> None:
    """Put a link to a weight file, and the configuration that open_clip builds the model from, into a folder."""
    import open_clip
    from open_clip.pretrained import get_pretrained_cfg

    config = open_clip.get_model_config(model)
    if config is None:
        raise CheckpointError(f"open_clip has no model '{model}'; `open_clip.list_models()` names them.")
    file = local_path(pretrained)
    tag = {} if file.is_file() else get_pretrained_cfg(model, pretrained)
    if not file.is_file():
        file = _fetch(model, pretrained, tag)
        if bool(tag.get("quick_gelu")) != bool(config.get("quick_gelu")):
            other = model.removesuffix("-quickgelu") + "-quickgelu" * bool(tag.get("quick_gelu"))
            raise CheckpointError(
                f"the weights '{pretrained}' were trained with {'Quick' * bool(tag.get('quick_gelu'))}GELU, '{model}' "
                f"computes the other one and would lose many points; use `model` '{other}'."
            )
    safe = file.suffix == ".safetensors"
    (folder / ("open_clip_model.safetensors" if safe else "open_clip_pytorch_model.bin")).symlink_to(file.resolve())
    preprocess = {key: tag[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in tag}
    (folder / _CONFIG).write_text(json.dumps({"model_cfg": config, "preprocess_cfg": preprocess}, indent=2))


def _fetch(model: str, pretrained: str, tag: dict[str, Any]) -> Path:
    """The weight file of a tag, from a cache or the hub; a path that does not exist is never looked up there."""
    from open_clip.pretrained import download_pretrained, list_pretrained_tags_by_model

    if not tag:
        known = ", ".join(list_pretrained_tags_by_model(model)) or "none"
        raise CheckpointError(
            f"`pretrained` '{pretrained}' is neither a folder nor a file nor a tag of '{model}' (its tags: {known})."
        )
    try:
        return Path(download_pretrained(tag))
    except Exception as error:  # what open_clip's downloads raise differs by source and version
        raise CheckpointError(
            f"the weights '{pretrained}' of '{model}' are not in the local cache and cannot be fetched "
            f"({type(error).__name__}); give a local folder or file as `pretrained`."
        ) from error
