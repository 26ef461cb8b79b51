"""Faults on demand: system calls that fail at a given count, and processes that are killed."""

import errno
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

FULL = OSError(errno.ENOSPC, "No space left on device")
CALLS: dict[str, tuple[Any, str]] = {
    "rename": (os, "rename"),
    "fsync": (os, "fsync"),
    "copyfile": (shutil, "copyfile"),
    "mkdir": (os, "mkdir"),
    "write_text": (Path, "write_text"),
    "open": (os, "open"),
    "write": (Path, "open"),
    "tensor": (os, "write"),
}


class _Half:
    """A file that fails in the middle of a write."""

    def __init__(self, file: Any, fault: "Fault") -> None:
        self.file, self.fault = file, fault

    def __enter__(self) -> "_Half":
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def write(self, data: Any) -> Any:
        if self.fault.due():
            self.file.write(data[: len(data) // 2])
            raise self.fault.error
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class Fault:
    """Counts calls of one kind, and raises at the ``at``-th (from 0)."""

    def __init__(self, kind: str, at: int | None, error: BaseException) -> None:
        self.kind, self.at, self.error, self.calls = kind, at, error, 0

    def due(self) -> bool:
        self.calls += 1
        return self.at is not None and self.calls == self.at + 1

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.kind == "write":
                file = real(*args, **kwargs)
                return _Half(file, self) if file.writable() else file
            if self.kind == "tensor" and not isinstance(args[1], memoryview):  # the name in a lock
                return real(*args)
            if self.due():
                raise self.error
            return real(*args, **kwargs)

        return call


@contextmanager
def failing(kind: str, at: int | None = None, error: BaseException = FULL) -> Iterator[Fault]:
    """Inside, the ``at``-th call of a kind fails; with ``None`` calls are only counted."""
    fault = Fault(kind, at, error)
    place, name = CALLS[kind]
    real = getattr(place, name)
    accessor = getattr(pathlib, "_normal_accessor", None)  # Python 3.10 has its own references to functions of `os`
    with ExitStack() as patches:
        for where in (place, accessor) if getattr(accessor, name, None) is real else (place,):
            patches.enter_context(mock.patch.object(where, name, fault.wrap(real)))
        yield fault
