"""Write whole files: a reader finds the earlier content or the new one, never half of either."""

import io
import json
import os
from pathlib import Path
from typing import Any, Protocol

__all__ = ["local_path", "read_object", "write_bytes", "write_figure", "write_json", "write_text"]


class Figure(Protocol):
    """What :func:`write_figure` needs of a figure of matplotlib, which is not imported here."""

    def savefig(self, fname: Any, /, *, format: str, dpi: int) -> object:
        """Draw the figure into an open file."""


def local_path(path: str | Path) -> Path:
    """A path with ``~`` and ``~user`` in front replaced by the home folder, whoever left them there.

    A shell does that in ``--output ~/merged``, but not in ``--output=~/merged``, in quotes or in a configuration.

    Raises:
        ValueError: if there is no such user, unless something with this very name exists.

    Example:
        >>> local_path("~/merged") == Path.home() / "merged", local_path("owner/name").as_posix()
        (True, 'owner/name')
    """
    given = Path(path)
    if not str(path).startswith("~") or (given.parts[0] != "~" and Path(given.parts[0]).exists()):
        return given
    try:
        return given.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {given.parts[0]} names no home folder; write the path out.") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file that somebody else wrote; empty if there is none, or it is damaged.

    Example:
        >>> read_object(Path("no such file"))
        {}
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it; folders on the way are made.

    Args:
        path: the file, replaced if it exists.
        content: all of it.

    Raises:
        OSError: if it cannot be written; an earlier file then stays, and nothing of the new one does.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "new" / "weights.bin"
        >>> write_bytes(path, b"abc")
        >>> path.read_bytes(), [file.name for file in path.parent.iterdir()]
        (b'abc', ['weights.bin'])
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text as :func:`write_bytes` does."""
    write_bytes(path, text.encode())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write strict JSON as :func:`write_bytes` does.

    Raises:
        ValueError: for NaN or an infinite number, which JSON does not have; leave undefined values out.
    """
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_figure(path: Path, figure: Figure) -> None:
    """Write a figure as PNG, as :func:`write_bytes` does."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_bytes(path, image.getvalue())
