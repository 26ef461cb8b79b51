"""Print on whatever console there is: a name that it cannot show must not fail a job that is done."""

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, TextIO, cast

__all__ = [
    "Tolerant",
    "be_quiet",
    "console_width",
    "fit_line",
    "is_quiet",
    "say",
    "show",
    "terminal_width",
    "tolerate_names",
]


class Tolerant:
    r"""A text stream that writes escapes for the characters that it cannot show; all else is the stream's own.

    Args:
        stream: where to; a console in cp1252 or ASCII, say.

    Example:
        >>> import io
        >>> console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        >>> _ = Tolerant(console).write("a \u6a21 b")
        >>> console.flush()
        >>> console.buffer.getvalue()
        b'a \\u6a21 b'
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, all of it, in one form or the other."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def say(*parts: object, error: bool = False) -> None:
    """Print a line at once, on standard output or standard error."""
    stream = sys.stderr if error else sys.stdout
    if stream is not None:  # a program without a console has none
        print(*parts, file=Tolerant(stream), flush=True)


def console_width() -> int:
    """Characters in a line of standard output; a log has no width of its own, so that nothing is cut there."""
    return terminal_width() or 160


def terminal_width() -> int | None:
    """Characters in a line of the terminal, or what ``COLUMNS`` says; ``None`` for a log."""
    if os.environ.get("COLUMNS", "").isdigit() or (sys.stdout is not None and sys.stdout.isatty()):
        return shutil.get_terminal_size().columns
    return None


def fit_line(text: str) -> str:
    """A line as it is, or in several where it is longer than the terminal is wide.

    It is broken between words, of which none is cut, so that a path stays whole. What follows is indented.

    Args:
        text: a no-break space keeps the words on both sides of it together; it is printed as a space.
    """
    width = terminal_width()
    if width is not None and len(text) > width:
        indent = " " * (len(text) - len(text.lstrip()) + 2)
        text = textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return text.replace("\xa0", " ")


def show(table: object) -> None:
    """Print a table of rich on standard output.

    Args:
        table: anything that rich prints.
    """
    from rich.console import Console

    Console(file=cast(TextIO, Tolerant(sys.stdout)), width=console_width()).print(table)


_QUIET = "SAFEMERGE_QUIET"
"""In the environment, so that processes which are started know it too."""


def is_quiet() -> bool:
    """Whether only problems are to be told."""
    return _QUIET in os.environ


@contextlib.contextmanager
def be_quiet() -> Iterator[None]:
    """Tell only problems for a while: nothing reaches standard output, and no progress is shown.

    Example:
        >>> with be_quiet():
        ...     print("unheard", is_quiet())
        >>> is_quiet()
        False
    """
    before = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        if before is None:
            del os.environ[_QUIET]


def tolerate_names() -> None:
    """Let everything that this process prints, also what other libraries print, pass on any console."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in ("strict", "surrogateescape"):
            with contextlib.suppress(AttributeError, ValueError):  # a stream that somebody put in its place
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
