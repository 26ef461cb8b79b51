"""Turn a class path that stands in a file into a class, without importing or calling what the file names."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from safemerge_pl.errors import CheckpointError

__all__ = ["build_stored", "own_path", "stored_class", "stored_paths", "subclasses"]

Base = TypeVar("Base")


def own_path(kind: type) -> str:
    """The path of the file that a class stands in, and its name there.

    Example:
        >>> own_path(CheckpointError)
        'safemerge_pl.errors.CheckpointError'
    """
    return f"{kind.__module__}.{kind.__qualname__}"


def stored_class(
    path: object, base: type[Base], source: str, *, remedy: str, public: Callable[[str], str] = str
) -> type[Base]:
    """The class that a stored path names, if it is a subclass of ours that this process has imported.

    A file may come from anybody, so its words are compared with the paths of the classes that are there. Nothing is
    imported, and no attribute of a module is looked up.

    Args:
        path: what stands in the file.
        base: what the class must be derived from.
        source: the file, or what it holds, for the message.
        remedy: what to do about a class that is not known, for the message.
        public: gives the path that a class is known by today from any that it was ever known by.

    Raises:
        CheckpointError: if it names anything else.

    Example:
        >>> class Shape: ...
        >>> class Circle(Shape): ...
        >>> stored_class(own_path(Circle), Shape, "a file", remedy="pass the shape") is Circle
        True
        >>> stored_class("os.system", Shape, "a file", remedy="pass the shape")
        Traceback (most recent call last):
            ...
        safemerge_pl.errors.CheckpointError: a file names os.system, which is no Shape that is imported; pass the shape.
    """
    if isinstance(path, str):
        found = [kind for kind in subclasses(base) if path == own_path(kind) or public(path) == public(own_path(kind))]
        if found:
            return found[-1]  # a class that was defined again stands behind its earlier self
    raise CheckpointError(f"{source} names {_shown(path)}, which is no {base.__name__} that is imported; {remedy}.")


def build_stored(kind: type[Base], init_args: object, source: str) -> Base:
    """An object of a class with the arguments that stand in a file.

    Args:
        kind: from :func:`stored_class`.
        init_args: arguments by name.
        source: the file, or what it holds, for the message.

    Raises:
        CheckpointError: if the class does not take them.

    Example:
        >>> build_stored(complex, {"real": 1.0}, "a file")
        (1+0j)
    """
    if not isinstance(init_args, Mapping):
        raise CheckpointError(f"{source}: the arguments of {kind.__name__} are no mapping; save it again.")
    try:
        return kind(**init_args)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{source}: {kind.__name__} cannot be built as it says ({error}).") from error


def stored_paths(content: Any) -> Iterator[Any]:
    """Everything in nested values from a file that a library may take for a class: under ``class_path`` keys.

    Example:
        >>> list(stored_paths({"a": [{"class_path": "b.C"}], "_class_path": "d.E"}))
        ['b.C', 'd.E']
    """
    if isinstance(content, Mapping):
        for key, value in content.items():
            if isinstance(key, str) and key.rpartition(".")[2] in ("class_path", "_class_path"):
                yield value
            else:
                yield from stored_paths(value)
    elif isinstance(content, (list, tuple, set)):
        for value in content:
            yield from stored_paths(value)


def subclasses(base: type[Base]) -> Iterator[type[Base]]:
    """All classes that are derived from one and imported.

    Example:
        >>> CheckpointError in subclasses(ValueError)
        True
    """
    for kind in type.__subclasses__(base):
        yield kind
        yield from subclasses(kind)


def _shown(path: object) -> str:
    """A path as it may stand in a message, whatever it is."""
    text = path if isinstance(path, str) and path.isprintable() else repr(path)
    return text if len(text) <= 200 else f"{text[:200]}..."
