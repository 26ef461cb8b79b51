"""CLIP of transformers as a backbone: its vision tower is merged; tokenizer, text tower and preprocessing stay."""

import hashlib
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from safemerge_pl.backbones.base import (
    Backbone,
    backbone_spec,
    load_tokenizer,
    model_folder,
    quiet_transformers,
    refuse_foreign_code,
)
from safemerge_pl.backbones.noise import noise_like
from safemerge_pl.checkpoints.open import CheckpointError, fingerprint

__all__ = ["CLIPBackbone"]


class CLIPBackbone(Backbone):
    """CLIP of transformers: the vision tower is merged, the text tower and both projections stay pretrained.

    Args:
        pretrained: folder or hub id of a ``CLIPModel``, or ``"zoo"`` for the embedded mini CLIP.
        revision: branch, tag or commit, for a hub id.
        image_backend: what resizes images: ``torchvision`` as transformers 5 does, or ``pil`` as earlier versions and
            the paper's pipeline do. Pixels differ by rounding.

    Example:
        >>> CLIPBackbone("zoo").spec()["init_args"]
        {'pretrained': 'zoo', 'revision': None, 'image_backend': 'torchvision'}
    """

    merged_attr = "vision_model"

    def __init__(
        self,
        pretrained: str = "zoo",
        revision: str | None = None,
        image_backend: Literal["torchvision", "pil"] = "torchvision",
    ) -> None:
        super().__init__()
        self.pretrained, self.revision, self.image_backend = str(pretrained), revision, image_backend
        self._text: dict[str, Any] = {}  # a plain dict: the text side is no part of the module's state

    def spec(self) -> dict[str, Any]:
        """See :class:`Backbone`."""
        return backbone_spec(self, pretrained=self.pretrained, revision=self.revision, image_backend=self.image_backend)

    def folder(self) -> Path:
        """See :class:`Backbone`."""
        if self.pretrained == "zoo":
            from safemerge_pl.zoo import Zoo

            return Zoo().model
        return model_folder(self.pretrained, self.revision, "CLIP")

    def load(self) -> None:
        """See :class:`Backbone`."""
        if hasattr(self, "vision_model"):
            return
        from transformers import CLIPModel

        folder = self.folder()
        if not (folder / "config.json").exists():
            raise CheckpointError(f"{folder} has no config.json; give the folder of a whole CLIP model.")
        refuse_foreign_code(folder)
        with quiet_transformers():
            try:
                model, info = CLIPModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
                tokenizer = load_tokenizer(folder)
            except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
                raise CheckpointError(f"{folder} is no CLIP model that transformers can load: {error}") from error
            missing = sorted(info["missing_keys"])
            if missing:
                raise CheckpointError(f"{folder} lacks {len(missing)} tensors of a CLIP model, first `{missing[0]}`.")
            self._text = {
                "tokenizer": tokenizer,
                "tower": model.text_model.eval(),
                "projection": model.text_projection,
            }
        self.vision_model, self.visual_projection = model.vision_model, model.visual_projection
        self.eval()

    def preprocess(self, images: Sequence[Any]) -> Tensor:
        """See :class:`Backbone`."""
        return self.preprocessor()(images)

    def preprocessor(self) -> Callable[[Sequence[Any]], Tensor]:
        """See :class:`Backbone`."""
        if not hasattr(self, "_processor"):
            self._processor = _ImageProcessor(self.folder(), self.image_backend)
        return self._processor

    def text_key(self) -> str | None:
        """See :class:`Backbone`; weights, activation and pooling of the text tower, and the tokenizer."""
        if "key" not in self._text:
            tower, tokenizer = self._text["tower"], self._text["tokenizer"]
            weights = fingerprint({**tower.state_dict(), "projection": self._text["projection"].weight})
            config = {key: value for key, value in tower.config.to_dict().items() if not key.endswith("version")}
            fast = getattr(tokenizer, "backend_tokenizer", None)
            words = json.loads(fast.to_str()) if fast is not None else {"vocab": tokenizer.get_vocab()}
            words |= {"truncation": None, "padding": None}  # of the last call
            known = (json.dumps(part, sort_keys=True, default=str) for part in (config, words))
            parts = [weights, *known, str(tokenizer.pad_token_id)]
            self._text["key"] = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        key: str = self._text["key"]
        return key

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """See :class:`Backbone`."""
        device = next(self.parameters()).device
        tokens = self._text["tokenizer"](list(texts), padding=True, return_tensors="pt").to(device)
        if tokens["input_ids"].shape[1] > self._text["tower"].config.max_position_embeddings:
            longest = max(texts, key=len)
            raise ValueError(
                f"the text tower takes {self._text['tower'].config.max_position_embeddings} tokens, which "
                f"'{longest}' exceeds; shorten the class name or the template."
            )
        pooled = self._text["tower"].to(device)(**tokens).pooler_output
        features: Tensor = self._text["projection"].to(device)(pooled)
        return features.cpu()

    def noise(self, count: int) -> Tensor:
        """See :class:`Backbone`; pictures."""
        return noise_like(self.preprocess, count)

    def forward(self, pixels: Tensor) -> Tensor:
        """See :class:`Backbone`."""
        features: Tensor = self.visual_projection(self.vision_model(pixels).pooler_output)
        return features


class _ImageProcessor:
    """The model's own preprocessing; small, so that worker processes get it without the model."""

    def __init__(self, folder: Path, backend: str) -> None:
        import transformers

        kind = transformers.CLIPImageProcessor
        if backend == "pil":  # before version 5 the one above
            kind = getattr(transformers, "CLIPImageProcessorPil", kind)
        try:
            self._processor = kind.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{folder} has no preprocessor_config.json that can be read; copy the pretrained model's there."
            ) from error

    def __call__(self, images: Sequence[Any]) -> Tensor:
        pixels: Tensor = self._processor([image.convert("RGB") for image in images], return_tensors="pt")[
            "pixel_values"
        ]
        return pixels
