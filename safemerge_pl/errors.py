"""Errors that a user's input can end in."""

__all__ = ["CheckpointError", "SilentExit", "UnknownOptionError"]


class CheckpointError(ValueError):
    """Raised for a checkpoint that cannot be used; one sentence names the file, the tensor and the remedy."""


class UnknownOptionError(TypeError, ValueError):
    """Raised for an option that does not exist; the message has the nearest name. A ``TypeError``, as Python's own."""


class SilentExit(SystemExit):
    """The end of a process of several, where another one says why."""
