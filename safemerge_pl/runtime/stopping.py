"""Ctrl-C and SIGTERM: what runs is stopped where it is, and somebody says how to go on."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Resumable", "Stop", "catch_stops"]


class Resumable(KeyboardInterrupt):
    """A stop after which there is a better way to go on than to repeat the command; its message says which."""


class Stop:
    """Whether somebody has asked this process to stop.

    Attributes:
        number: of the signal; ``None`` as long as nobody has.
    """

    number: int | None = None

    @property
    def name(self) -> str:
        """What a person calls the signal."""
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number or 0).name


@contextlib.contextmanager
def catch_stops() -> Iterator[Stop]:
    """Raise ``KeyboardInterrupt`` for both signals, and remember which it was; a second one raises again.

    Other threads than the main one may not take signals; there nothing is caught.

    Example:
        >>> import os
        >>> with catch_stops() as stop:
        ...     try:
        ...         signal.raise_signal(signal.SIGTERM)
        ...     except KeyboardInterrupt:
        ...         pass
        >>> stop.name
        'SIGTERM'
    """
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.number = number
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
