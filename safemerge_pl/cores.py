"""Score images on the CPU with one thread a core."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor, nn

__all__ = ["forward_on_cores"]

_PART = 16
"""Images a part: activations of a small part stay in cache."""


def forward_on_cores(model: nn.Module, pixels: Tensor) -> Tensor:
    """``model(pixels)``, on the CPU with parts of the batch on separate threads.

    Splitting a batch keeps all cores busy where splitting each operation makes them wait for each other, above all
    when another program uses a core. On other devices, with gradients or under autocast it is a plain call.

    Args:
        model: any module whose output has one row an image.
        pixels: ``(N, ...)``.

    Returns:
        What the model returns, ``(N, ...)``.

    Example:
        >>> with torch.no_grad():
        ...     forward_on_cores(nn.Identity(), torch.arange(40)).equal(torch.arange(40))
        True
    """
    threads = torch.get_num_threads()
    plain = pixels.device.type != "cpu" or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    if plain or threads == 1 or len(pixels) <= _PART:
        output: Tensor = model(pixels)
        return output
    inference = torch.is_inference_mode_enabled()

    def score(part: Tensor) -> Tensor:
        with torch.inference_mode(inference), torch.no_grad():  # both are a thread's own
            result: Tensor = model(part)
            return result

    parts = [pixels[start : start + _PART] for start in range(0, len(pixels), _PART)]
    return torch.cat(list(_pool(threads).map(score, parts)))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "safemerge-core", initializer=torch.set_num_threads, initargs=(1,))
