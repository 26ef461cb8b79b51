"""Parsers that say which option was meant where there is none of the name given."""

import difflib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from safemerge_pl.commands.wording import in_one_sentence
from safemerge_pl.runtime.classes import subclasses

__all__ = ["HintingParser", "Hints"]


class Hints:
    """Adds the nearest right name to what a parser says of a wrong one; mixed into a parser of jsonargparse."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say it in a line or two and exit with 2, as every parser does; ``SAFEMERGE_TRACEBACK=1`` shows it whole."""
        if os.environ.get("SAFEMERGE_TRACEBACK") or not getattr(self, "exit_on_error", True):
            super().error(message, ex)  # type: ignore[misc]
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [name for name in getattr(parser, "_option_string_actions", {}) if name.startswith("--")]
        try:
            told, hints = in_one_sentence(message), list(dict.fromkeys(_hints(message, options)))
        except Exception:  # whatever somebody's class does when it is looked at, the message itself must be seen
            told, hints = message, []
        verb = next((word for word in sys.argv[1:2] if not word.startswith("-")), "VERB")
        hint = hints[0] if hints else f"`safemerge {verb} --help` lists the options."
        print(f"safemerge: {told}\n  {hint}", file=sys.stderr)
        raise SystemExit(2)


class HintingParser(Hints, ArgumentParser):
    """A parser of a verb that is not LightningCLI's."""


def _hints(message: str, options: list[str]) -> Iterator[str]:
    """What was probably meant by each name that a message finds fault with."""
    for path, option in re.findall(r"class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", message):
        yield from _nearest(option, _accepted(_imported(path)))
    for option in re.findall(r"unrecognized arguments: (--[\w.]+)", message):
        yield from _nearest(option, options)
    of_class = "class_path '" in message
    for option in [] if of_class else re.findall(r"Option '([\w.]+)' is not accepted", message):
        yield from (hint.replace("'--", "'") for hint in _nearest(f"--{option}", options))
    for name in re.findall(r"Expected a dot import path string: ([\w.]+)", message):
        for base in map(_imported, re.findall(r"<class '([\w.]+)'>", message)):
            yield from _nearest(name, [kind.__name__ for kind in _derived(base)])


def _nearest(name: str, known: list[str]) -> Iterator[str]:
    close = [found for found in difflib.get_close_matches(name, known, n=1, cutoff=0.65) if found != name]
    yield from (f"Did you mean '{found}' by '{name.removeprefix('--')}'?" for found in close)


def _imported(path: str) -> Any:
    """A class by its dotted path, if its module is imported already; nothing is imported here."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _accepted(kind: Any) -> list[str]:
    """Options of a class, those behind ``**`` as well, and of our classes derived from it.

    A parser that was given a single option of a callback, without its class, tells of the base class alone.
    """
    if not isinstance(kind, type):
        return []
    found: list[str] = []
    for each in (kind, *(below for below in _derived(kind) if below.__module__.startswith("safemerge_pl."))):
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(each, fail_untyped=False)
        found += [action.dest for action in parser._actions]
    return found


def _derived(kind: Any) -> list[type]:
    """All classes derived from one; none where it is no class that is imported."""
    return list(subclasses(kind)) if isinstance(kind, type) else []
