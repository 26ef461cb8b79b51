"""What may stand on a command line: the options of a parser, and the words that each of them takes."""

import inspect
import re
from argparse import SUPPRESS, Action
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin

from jsonargparse import ArgumentParser

from safemerge_pl.runtime.classes import subclasses

__all__ = ["Option", "list_options"]


class Option(NamedTuple):
    """An option, or a value that stands by itself.

    Attributes:
        names: with their dashes; empty for a value that stands by itself.
        words: values that it takes, as far as they have names.
        files: whether it also takes a path.
        nargs: number of its values, as argparse writes it.
        help: a line.
    """

    names: tuple[str, ...]
    words: tuple[str, ...]
    files: bool
    nargs: int | str | None
    help: str


def list_options(parser: ArgumentParser) -> Iterator[Option]:
    """Give all options of a parser, and those of the classes that can be chosen by them, each name once.

    Args:
        parser: of jsonargparse.

    Example:
        >>> parser = ArgumentParser()
        >>> _ = parser.add_argument("--dtype", type=Literal["same", "float32"] | None, help="of the output (2 or 4)")
        >>> list(list_options(parser))[-1]
        Option(names=('--dtype',), words=('same', 'float32', 'null'), files=False, nargs=None, help='of the output')
    """
    seen = set[str]()
    for option in (*_own(parser), *_of_classes(parser)):
        names = tuple(name for name in option.names if name not in seen)
        seen.update(names)
        if names or not option.names:
            yield option._replace(names=names)


def _own(parser: ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        if action.help != SUPPRESS:
            kind = _type(action)
            takes = action.nargs != 0 and action.dest != "print_config"
            classes = [each.__name__ for each in _classes(action, parser)]
            words = tuple(dict.fromkeys((*classes, *_words(kind)))) if takes else ()
            yield Option(
                names=tuple(name for name in action.option_strings if not name.endswith("+")),
                words=() if words == ("null",) else words,  # it would be filled in where another value is meant
                files=takes and not classes and (kind is None or str in _parts(kind)),
                nargs=action.nargs if takes else 0,
                help=_shortened(action.help or ""),
            )


def _type(action: Action) -> Any:
    """Of the values; ``None`` for the path of a configuration."""
    return getattr(action, "_typehint", None)


def _shortened(told: str) -> str:
    """The first clause of a help, without its markup."""
    plain = re.sub(r":\w+:`([^`]*)`", r"\1", " ".join(told.split())).replace("`", "")
    return re.split(r" \(|[.;:] ", plain)[0].rstrip(".")


def _of_classes(parser: ArgumentParser) -> Iterator[Option]:
    """Settings of the classes that options choose, one level down; further down there are thousands."""
    for action in parser._actions:
        if not action.dest.endswith(".help"):
            for kind in _classes(action, parser):
                yield from _own(_class_parser(kind, action.dest))


@cache
def _class_parser(kind: type, key: str) -> ArgumentParser:
    parser = ArgumentParser(add_help=False)
    try:
        parser.add_class_arguments(kind, key, fail_untyped=False)
    except Exception:  # somebody's class that cannot be looked into has no options
        return ArgumentParser(add_help=False)
    return parser


def _classes(action: Action, parser: ArgumentParser) -> Iterator[type]:
    """Those that an option chooses from; then the parser has an option for their help, too."""
    if f"--{action.dest.removesuffix('.help')}.help" in parser._option_string_actions:
        for base in _parts(_type(action)):
            if _is_class(base):
                yield from _choices(base)


def _choices(base: Any) -> Iterator[type]:
    """Classes of a kind that has a few; any layer of torch is none of them."""
    if base.__module__.partition(".")[0] not in ("builtins", "torch"):
        kinds: Iterator[type] = subclasses(base)
        for kind in kinds:
            if not kind.__name__.startswith("_") and not inspect.isabstract(kind):
                yield kind


def _parts(kind: Any) -> Iterator[Any]:
    """The types of a union and of the items of a list."""
    if get_origin(kind) in (None, Literal, Callable, dict, type):
        yield kind
    else:
        for part in get_args(kind):
            yield from _parts(part)


def _is_class(kind: Any) -> bool:
    """Whether a type is a class; to ``isinstance`` of Python 3.10 alone ``list[int]`` is one."""
    return isinstance(kind, type) and get_origin(kind) is None


def _words(kind: Any) -> Iterator[str]:
    for part in _parts(kind):
        if part is bool:
            yield from ("true", "false")
        elif get_origin(part) is Literal:
            yield from ("null" if value is None else str(value) for value in get_args(part))
        elif _is_class(part) and issubclass(part, Enum):
            yield from part.__members__
        elif part is type(None):
            yield "null"
