"""Settings of the method among the options of a fold, given by themselves."""

import inspect
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from safemerge_pl.methods import MergeMethod
from safemerge_pl.runtime.classes import subclasses

__all__ = ["put_under_method"]

_DEFAULT = "SafeMerge"
"""The method that is meant where none is chosen."""


def put_under_method(arguments: Sequence[str], own: Collection[str]) -> list[str]:
    """Let a setting of the method stand by itself: ``--keep_ratio`` for ``--method.keep_ratio``.

    The method is the one chosen by ``--method``, else by a configuration, else SAFE-Merge.

    Args:
        arguments: of ``safemerge fold``; configurations by their paths or in full.
        own: options of the fold itself, which are never taken for a setting of the method.

    Returns:
        The arguments, with the method named where only its settings were given.

    Example:
        >>> put_under_method(["--keep_ratio", "0.3", "--dtype", "same"], ["dtype"])
        ['--method', 'SafeMerge', '--method.keep_ratio', '0.3', '--dtype', 'same']
        >>> put_under_method(["--method=OPCM", "--alpha=0.4", "--keep_ratio=0.3"], [])
        ['--method=OPCM', '--method.alpha=0.4', '--keep_ratio=0.3']
        >>> put_under_method(["--config", "method: OPCM", "--alpha", "0.4"], [])
        ['--config', 'method: OPCM', '--method.alpha', '0.4']
    """
    chosen = _chosen_method(arguments)
    base: Any = MergeMethod
    name = (chosen or _DEFAULT).rpartition(".")[2]
    kinds = [kind for kind in subclasses(base) if kind.__name__ == name]
    settings = {setting for kind in kinds for setting in inspect.signature(kind).parameters} - set(own)

    def move(argument: str) -> str:
        option, equals, value = argument.partition("=")
        return f"--method.{option[2:]}{equals}{value}" if option[:2] == "--" and option[2:] in settings else argument

    found = [move(argument) for argument in arguments]
    if chosen is None and any(argument.startswith("--method.") for argument in found):
        return ["--method", _DEFAULT, *found]
    return found


def _chosen_method(arguments: Sequence[str]) -> str | None:
    """Class name or path of the method that is chosen last, on the command line before any configuration."""
    given = [value for option, value in _pairs(arguments) if option == "--method"]
    configs = [_method_of(value) for option, value in _pairs(arguments) if option in ("--config", "-c")]
    return next(filter(None, (*reversed(given), *reversed(configs))), None)


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option with the value that follows it."""
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        yield option, value if equals else next(iter(arguments[place + 1 : place + 2]), "")


def _method_of(config: str) -> str | None:
    """The method that a configuration names; ``None`` for one that the parser will say what is wrong with."""
    try:
        values = yaml.safe_load(Path(config).read_text(encoding="utf-8") if os.path.isfile(config) else config)
    except (yaml.YAMLError, OSError, UnicodeDecodeError):
        return None
    method = values.get("method") if isinstance(values, dict) else None
    name = method.get("class_path") if isinstance(method, dict) else method
    return name if isinstance(name, str) else None
