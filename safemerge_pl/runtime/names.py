"""Names that people give: a list of them, or one that is nearly right."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, ParamSpec, TypeVar

from safemerge_pl.errors import UnknownOptionError

__all__ = ["count_of", "did_you_mean", "name_list", "nearest", "refuse_unknown", "suggest_options"]

P = ParamSpec("P")
R = TypeVar("R")


def name_list(given: str | Sequence[str], what: str) -> list[str]:
    """A list of names; a single string is one name, not its letters.

    Args:
        given: names in an order that matters.
        what: name of the argument, for messages.

    Raises:
        ValueError: if it has no order, or something in it is no string.

    Example:
        >>> name_list("mnist", "tasks"), name_list(("a", "b"), "tasks")
        (['mnist'], ['a', 'b'])
    """
    if isinstance(given, str):
        return [given]
    if isinstance(given, (Mapping, Set, bytes)) or not isinstance(given, Iterable):
        raise ValueError(f"`{what}` must be a list of names, got {_shown(given)}.")
    names = list(given)
    wrong = next((name for name in names if not isinstance(name, str)), None)
    if wrong is not None or None in names:
        raise ValueError(f"`{what}` must be a list of names, but {_shown(wrong)} in it is none; put quotes around it.")
    return names


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that is nearest to one that is not known; ``None`` if none is near.

    Example:
        >>> nearest("metrics", ["metric", "score"]), nearest("x", ["metric", "score"])
        ('metric', None)
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest to one that is not known, as the end of a message; all of them if none is near.

    Example:
        >>> did_you_mean("metrics", ["metric", "score"]), did_you_mean("x", ["metric", "score"])
        ("did you mean 'metric'?", 'there are metric, score.')
    """
    names = list(known)
    close = nearest(name, names)
    return f"did you mean '{close}'?" if close is not None else f"there are {', '.join(names)}."


def count_of(number: int, what: str) -> str:
    """A number of things, with the plural where it is not one.

    Example:
        >>> count_of(1, "task"), count_of(8, "task")
        ('1 task', '8 tasks')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse names that are none of the known ones.

    Args:
        given: the names.
        known: those that there are.
        what: what has them, for the message: "MergeCallback has no option".

    Raises:
        UnknownOptionError: with the name that was meant, probably.

    Example:
        >>> refuse_unknown(["metrics"], ["metric", "score"], "MergeCallback has no option")
        Traceback (most recent call last):
        safemerge_pl.errors.UnknownOptionError: MergeCallback has no option 'metrics'; did you mean 'metric'?
    """
    names = list(known)
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        raise UnknownOptionError(f"{what} '{unknown}'; {did_you_mean(unknown, names)}")


def suggest_options(constructor: Callable[P, R]) -> Callable[P, R]:
    """Let a constructor say which of its options was meant where it has none of the name given."""
    options = [name for name in inspect.signature(constructor).parameters if name != "self"]
    owner = constructor.__qualname__.partition(".")[0]

    @functools.wraps(constructor)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(kwargs, options, f"{owner} has no option")
        return constructor(*args, **kwargs)

    return checked


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
