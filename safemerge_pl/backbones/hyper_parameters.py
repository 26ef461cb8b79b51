"""What Lightning would build from the hyper-parameters in a checkpoint, looked at before Lightning does."""

import pickle
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.cloud_io import _load

from safemerge_pl.backbones.base import backbone_class
from safemerge_pl.errors import CheckpointError
from safemerge_pl.runtime.classes import stored_class, stored_paths

__all__ = ["require_known_classes", "require_known_file"]

_KEYS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams", "module_arguments")
"""Where this and earlier versions of Lightning keep what a module or data module was built with."""

_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")
"""Functions that Lightning imports by their name in a checkpoint and calls; LightningCLI writes one of these."""


def require_known_classes(checkpoint: object, source: str, module: type, given: Collection[str] = ()) -> None:
    """Refuse a checkpoint whose hyper-parameters name anything but modules and backbones that are imported.

    Lightning and jsonargparse import whatever stands there before they look at what it is.

    Args:
        checkpoint: its whole content.
        source: the file, for the message.
        module: class of the LightningModule or LightningDataModule that is built.
        given: hyper-parameters that the caller passes, which take the place of those in the file.

    Raises:
        CheckpointError: naming the file and the class.

    Example:
        >>> require_known_classes({"hyper_parameters": {"backbone": {"class_path": "os.system"}}}, "a.ckpt", object)
        Traceback (most recent call last):
            ...
        safemerge_pl.errors.CheckpointError: a.ckpt names os.system, which is no Backbone that is imported; import \
the module of your own backbone first, or pass `backbone`.
    """
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"{source} is no checkpoint of Lightning's; give one that a Trainer wrote.")
    for key in _KEYS:
        content = checkpoint.get(key) or {}
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{source}: `{key}` is no mapping; save the checkpoint again.")
        _require_module(content, source, module)
        for name, value in content.items():
            if name not in given and name not in ("_class_path", "_instantiator"):
                _require_backbones(name, value, source)


def require_known_file(
    kind: type, path: Any, hparams_file: Any = None, weights_only: bool = True, given: Collection[str] = ()
) -> None:
    """:func:`require_known_classes` for what ``load_from_checkpoint`` is given.

    Args:
        kind: class of the LightningModule or LightningDataModule that is built.
        path: path, address or open file of the checkpoint.
        hparams_file: a file of hyper-parameters to use instead of those in the checkpoint.
        weights_only: refuse a checkpoint that holds other objects than tensors and plain values.
        given: see there.

    Raises:
        CheckpointError: naming the file and the class, or if the checkpoint is damaged or holds other objects.
    """
    try:
        checkpoint = _load(path, map_location="meta", weights_only=weights_only)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors and plain values ({str(error).splitlines()[0]}); fetch it "
            "again, or load it with `weights_only=False` if you trust it."
        ) from error
    if hasattr(path, "seek"):
        path.seek(0)
    require_known_classes(checkpoint, str(path), kind, given)
    if hparams_file is not None and str(hparams_file).endswith((".yaml", ".yml")):
        try:
            content = yaml.safe_load(Path(hparams_file).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{hparams_file} holds more than plain values ({error}); mend it.") from error
        require_known_classes({"hyper_parameters": content}, str(hparams_file), kind, given)


def _require_module(content: Mapping[Any, Any], source: str, module: type) -> None:
    instantiator, path = content.get("_instantiator"), content.get("_class_path")
    if instantiator is not None and instantiator not in _INSTANTIATORS:
        raise CheckpointError(f"{source} asks to be built by {instantiator!r}, which is not done; save it again.")
    if path is not None and (path != f"{module.__module__}.{module.__qualname__}"):
        stored_class(path, module, source, remedy="import the module of your own class first")


def _require_backbones(name: object, value: object, source: str) -> None:
    if name == "backbone" and value is not None and not isinstance(value, Mapping):
        backbone_class(value, source)  # a bare word is taken for a class path, too
    for path in stored_paths({name: value}):
        backbone_class(path, source)
    text = next((text for text in _texts({name: value}) if "class_path" in text), None)
    if text is not None:  # a text where an object belongs is parsed as YAML
        raise CheckpointError(f"{source}: `{name}` holds a class path inside of a text; save the checkpoint again.")


def _texts(content: object) -> Iterator[str]:
    """Every text in nested values, and every key of two parts, which stands for nested ones."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        yield from (key for key in content if isinstance(key, str) and key not in ("class_path", "_class_path"))
        for value in content.values():
            yield from _texts(value)
    elif isinstance(content, (list, tuple, set)):
        for value in content:
            yield from _texts(value)
