"""What a user's input can end in."""

__all__ = ["CheckpointError", "UnknownOptionError"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, in one sentence with the file, the tensor and the remedy."""


class UnknownOptionError(TypeError, ValueError):
    """An option that there is not; the message has the nearest name. A ``TypeError``, as Python's own is."""
