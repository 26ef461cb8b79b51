"""The error that a checkpoint can end in."""

__all__ = ["CheckpointError"]


class CheckpointError(ValueError):
    """Raised for a checkpoint that cannot be used; one sentence names the file, the tensor and the remedy."""
