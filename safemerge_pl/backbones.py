"""Backbones: the model that is merged, with what it takes to score it (preprocessing, text side)."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from safemerge_pl.checkpoints import CheckpointError

__all__ = ["Backbone", "CLIPBackbone", "build_backbone"]


class Backbone(nn.Module, ABC):
    """A model in three parts: the tower that is merged, its frozen head side, and its preprocessing.

    Constructors take plain values only and read nothing, so that a backbone can be described in a configuration and in
    a checkpoint; :meth:`load` reads the weights.

    Attributes:
        merged_attr: name of the sub-module that is merged.
    """

    merged_attr: str

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """``class_path`` and ``init_args`` that build this backbone again."""

    @abstractmethod
    def load(self) -> None:
        """Read the pretrained weights; a second call does nothing."""

    @abstractmethod
    def folder(self) -> Path:
        """Folder of the pretrained model, whose files complete a merged one."""

    @abstractmethod
    def preprocess(self, examples: Sequence[Any]) -> Any:
        """The input of :meth:`forward`: of PIL images ``(N, C, H, W)`` float32, of texts tokens by name."""

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """Text features of the pretrained text tower, ``(N, D)``, not normalised; only a model for images has one."""
        raise MisconfigurationException(f"{type(self).__name__} has no zero-shot heads, so it cannot score images.")

    @abstractmethod
    def forward(self, inputs: Any) -> Tensor:
        """Image features ``(N, D)`` in the space of :meth:`encode_text`, not normalised; or generated tokens."""


class CLIPBackbone(Backbone):
    """CLIP of transformers: the vision tower is merged, the text tower and both projections stay pretrained.

    Args:
        pretrained: folder or hub id of a ``CLIPModel``, or ``"zoo"`` for the embedded mini CLIP.
        revision: branch, tag or commit, for a hub id.

    Example:
        >>> CLIPBackbone("zoo").spec()["init_args"]
        {'pretrained': 'zoo', 'revision': None}
    """

    merged_attr = "vision_model"

    def __init__(self, pretrained: str = "zoo", revision: str | None = None) -> None:
        super().__init__()
        self.pretrained, self.revision = str(pretrained), revision
        self._text: dict[str, Any] = {}  # a plain dict: the text side is no part of the module's state

    def spec(self) -> dict[str, Any]:
        """See :class:`Backbone`."""
        return _spec(self, pretrained=self.pretrained, revision=self.revision)

    def folder(self) -> Path:
        """See :class:`Backbone`."""
        if self.pretrained == "zoo":
            from safemerge_pl.zoo import Zoo

            return Zoo().model
        path = Path(self.pretrained).expanduser()
        if not path.is_dir():
            from safemerge_pl.checkpoints import open_checkpoint

            found = open_checkpoint(self.pretrained, revision=self.revision).folder
            if found is None:
                raise CheckpointError(f"`pretrained` {self.pretrained} is a file; give the folder of the CLIP model.")
            path = found
        return path

    def load(self) -> None:
        """See :class:`Backbone`."""
        if hasattr(self, "vision_model"):
            return
        from transformers import AutoTokenizer, CLIPModel

        folder = self.folder()
        if not (folder / "config.json").exists():
            raise CheckpointError(f"{folder} has no config.json; give the folder of a whole CLIP model.")
        with _quiet_transformers():
            try:
                model, info = CLIPModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
            except (OSError, RuntimeError, ValueError) as error:
                raise CheckpointError(f"{folder} is no CLIP model that transformers can load: {error}") from error
            missing = sorted(info["missing_keys"])
            if missing:
                raise CheckpointError(f"{folder} lacks {len(missing)} tensors of a CLIP model, first `{missing[0]}`.")
            self._text = {
                "tokenizer": AutoTokenizer.from_pretrained(folder),
                "tower": model.text_model.eval(),
                "projection": model.text_projection,
            }
        self.vision_model, self.visual_projection = model.vision_model, model.visual_projection
        self.eval()

    def preprocess(self, images: Sequence[Any]) -> Tensor:
        """See :class:`Backbone`."""
        if not hasattr(self, "_processor"):
            from transformers import CLIPImageProcessor

            self._processor = CLIPImageProcessor.from_pretrained(self.folder())
        pixels: Tensor = self._processor([image.convert("RGB") for image in images], return_tensors="pt")[
            "pixel_values"
        ]
        return pixels

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """See :class:`Backbone`."""
        tokens = self._text["tokenizer"](list(texts), padding=True, return_tensors="pt")
        pooled = self._text["tower"](**tokens).pooler_output
        features: Tensor = self._text["projection"](pooled)
        return features

    def forward(self, pixels: Tensor) -> Tensor:
        """See :class:`Backbone`."""
        features: Tensor = self.visual_projection(self.vision_model(pixels).pooler_output)
        return features


def build_backbone(backbone: Backbone | Mapping[str, Any]) -> Backbone:
    """A backbone, or one built from its :meth:`Backbone.spec`.

    Example:
        >>> build_backbone(CLIPBackbone("zoo").spec()).pretrained
        'zoo'
    """
    if isinstance(backbone, Backbone):
        return backbone
    module, _, name = backbone["class_path"].rpartition(".")
    built: Backbone = getattr(importlib.import_module(module), name)(**backbone["init_args"])
    return built


def _spec(backbone: Backbone, **init_args: Any) -> dict[str, Any]:
    kind = type(backbone)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": init_args}


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Neither progress bars nor load reports: what matters is checked and said by us."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
