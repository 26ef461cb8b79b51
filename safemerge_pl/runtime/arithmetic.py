"""Arithmetic that does not depend on the settings in force where a fold is called."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["exact_arithmetic"]


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Work in full float32: no autocast, no TF32, no inference mode and no graph, whatever the caller has switched on.

    Autocast, inference mode and gradients are set per thread: threads that are started inside have to set their own.

    Args:
        device: where the arithmetic runs.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16), exact_arithmetic(torch.device("cpu")):
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.float32
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
