"""The one error that a user's input can end in."""

__all__ = ["CheckpointError"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, in one sentence with the file, the tensor and the remedy."""
