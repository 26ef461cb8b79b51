"""Training and evaluation mode of a module."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards each sub-module has its own mode again.

    Example:
        >>> module = nn.Dropout()
        >>> with evaluating(module):
        ...     module.training
        False
        >>> module.training
        True
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
