"""Backbones: the model that is merged, with what it takes to score it (preprocessing, text side)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from safemerge_pl.checkpoints.adapter_config import ADAPTER_CONFIG
from safemerge_pl.checkpoints.open import CheckpointError, open_checkpoint
from safemerge_pl.runtime.classes import build_stored, own_path, stored_class
from safemerge_pl.runtime.files import local_path, read_object

__all__ = [
    "Backbone",
    "backbone_class",
    "backbone_spec",
    "build_backbone",
    "cache_key",
    "load_tokenizer",
    "model_folder",
    "quiet_transformers",
    "refuse_foreign_code",
    "without_foreign_code",
]

_ROOM = "safemerge_pl.backbones"
_EARLIER = {
    f"{_ROOM}.OpenCLIPBackbone": "safemerge_pl.open_clip_backbone.OpenCLIPBackbone",
    f"{_ROOM}.T5Backbone": "safemerge_pl.t5_backbone.T5Backbone",
}
"""Public path of a class -> the path that version 0.1.0 wrote into checkpoints and kept results under."""


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

    def preprocessor(self) -> Callable[[Sequence[Any]], Tensor]:
        """:meth:`preprocess` in a form that is cheap to send to another process."""
        return self.preprocess

    def text_key(self) -> str | None:
        """Hash of everything that :meth:`encode_text` depends on; ``None`` if it is not known."""
        return None

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """Text features of the pretrained text tower, ``(N, D)``, not normalised; only a model for images has one."""
        raise MisconfigurationException(f"{type(self).__name__} has no zero-shot heads, so it cannot score images.")

    def noise(self, count: int) -> Any | None:
        """Input of :meth:`features` that no data went into, the same at every call; ``None`` if there is none.

        Args:
            count: examples, all in one batch.
        """
        return None

    def features(self, inputs: Any) -> Tensor:
        """What a model makes of its input before anything is decided, ``(N, D)``; those of an image by default."""
        found: Tensor = self(inputs)
        return found

    @abstractmethod
    def forward(self, inputs: Any) -> Tensor:
        """Image features ``(N, D)`` in the space of :meth:`encode_text`, not normalised; or generated tokens."""


def build_backbone(backbone: Backbone | Mapping[str, Any], source: str = "the description of a backbone") -> Backbone:
    """A backbone, or one built from its :meth:`Backbone.spec`, whatever version wrote that.

    Args:
        backbone: it may stand in a checkpoint of anybody's, so nothing that it names is imported.
        source: where it stands, for messages.

    Raises:
        CheckpointError: if it describes no backbone, or one of a class that is not imported.

    Example:
        >>> build_backbone({"class_path": "safemerge_pl.backbones.CLIPBackbone", "init_args": {}}).pretrained
        'zoo'
        >>> type(build_backbone({"class_path": "safemerge_pl.t5_backbone.T5Backbone", "init_args": {}})).__name__
        'T5Backbone'
    """
    if isinstance(backbone, Backbone):
        return backbone
    described = isinstance(backbone, Mapping)
    kind = backbone_class(backbone.get("class_path") if described else backbone, source)
    return build_stored(kind, backbone.get("init_args", {}), source)


def backbone_class(path: object, source: str) -> type[Backbone]:
    """The class of backbones that a stored path names, in any version's spelling.

    Raises:
        CheckpointError: if it is none that is imported.

    Example:
        >>> backbone_class("safemerge_pl.t5_backbone.T5Backbone", "a checkpoint").__name__
        'T5Backbone'
    """
    remedy = "import the module of your own backbone first, or pass `backbone`"
    return stored_class(path, Backbone, source, remedy=remedy, public=_public_path)  # type: ignore[type-abstract]


def model_folder(pretrained: str, revision: str | None, kind: str) -> Path:
    """Folder of a model that is named as a folder or hub id.

    Args:
        pretrained: the name.
        revision: branch, tag or commit, for a hub id.
        kind: of model, for the message.

    Raises:
        CheckpointError: if it is neither.
    """
    path = local_path(pretrained)
    if path.is_dir():
        return path
    found = open_checkpoint(pretrained, revision=revision).folder
    if found is None:
        raise CheckpointError(f"`pretrained` {pretrained} is a file; give the folder of the {kind} model.")
    return found


def backbone_spec(backbone: Backbone, **init_args: Any) -> dict[str, Any]:
    """What :meth:`Backbone.spec` returns for a class and its arguments: the public path, for files may move."""
    return {"class_path": _public_path(own_path(type(backbone))), "init_args": init_args}


def cache_key(backbone: Backbone) -> dict[str, Any]:
    """The :meth:`Backbone.spec` that kept results are found under: with the path that a class had at first.

    Example:
        >>> from safemerge_pl.backbones import T5Backbone
        >>> cache_key(T5Backbone())["class_path"]
        'safemerge_pl.t5_backbone.T5Backbone'
    """
    spec = backbone.spec()
    return spec | {"class_path": _EARLIER.get(spec["class_path"], spec["class_path"])}


def _public_path(path: str) -> str:
    """The path under which a class of this package is imported, from an earlier path or that of its file.

    Example:
        >>> _public_path("safemerge_pl.backbones.base.CLIPBackbone"), _public_path("mine.Backbone")
        ('safemerge_pl.backbones.CLIPBackbone', 'mine.Backbone')
    """
    public = {earlier: now for now, earlier in _EARLIER.items()}
    if path.startswith(f"{_ROOM}."):
        return f"{_ROOM}.{path.rpartition('.')[2]}"
    return public.get(path, path)


def refuse_foreign_code(folder: Path) -> None:
    """Refuse a model's folder that asks transformers or open_clip to fetch and run code, or to load another model.

    Args:
        folder: of a pretrained model; it may come from anybody.

    Raises:
        CheckpointError: naming the file, the entry and what it asks for.
    """
    if (folder / ADAPTER_CONFIG).exists():
        raise CheckpointError(
            f"{folder} is an adapter ({ADAPTER_CONFIG}), no whole model; merge it into its base first."
        )
    for file in ("config.json", "open_clip_config.json"):
        # of a damaged file, whoever loads the model says what is wrong with it
        entry = next(_code_entries(read_object(folder / file)), None)
        if entry is not None:
            raise CheckpointError(
                f"{folder / file}: `{entry[0]}` is {entry[1]!r}, which would fetch and run code; take the entry out if "
                "the model works without it."
            )


def _code_entries(settings: Any) -> Iterator[tuple[str, Any]]:
    """Entries, also nested ones, that make a library trust code, or fetch a kernel from the hub."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            kernel = key.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value)
            if kernel or (key in ("trust_remote_code", "use_kernels", "allow_all_kernels") and value):
                yield key, value
            yield from _code_entries(value)
    elif isinstance(settings, list):
        for value in settings:
            yield from _code_entries(value)


def load_tokenizer(folder: Path) -> Any:
    """A model's tokenizer, of the kinds that transformers has.

    Raises:
        CheckpointError: for a tokenizer that is code of the model's own, which is never run.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise CheckpointError(
            f"{folder}: the tokenizer is code of the model's own, which is never run; save a tokenizer of "
            "transformers' own there."
        ) from error


@contextmanager
def without_foreign_code() -> Iterator[None]:
    """Code in a model's repository is not run, and nobody is asked whether it should be."""
    from transformers import dynamic_module_utils

    seconds = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # for an answer at the terminal
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = seconds


@contextmanager
def quiet_transformers() -> Iterator[None]:
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
