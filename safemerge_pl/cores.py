"""Work on the CPU with one thread a core: many small problems side by side instead of each one split."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["forward_on_cores", "map_on_cores"]

_In = TypeVar("_In")
_Out = TypeVar("_Out")

_PART = 16
"""Images a part: activations of a small part stay in cache."""


def forward_on_cores(model: nn.Module, pixels: Tensor) -> Tensor:
    """``model(pixels)``, on the CPU with parts of the batch on separate threads.

    Splitting a batch keeps all cores busy where splitting each operation makes them wait for each other, above all
    when another program uses a core; on one thread it keeps the activations in cache. On other devices, with gradients
    or under autocast it is a plain call.

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
    plain = pixels.device.type != "cpu" or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    if plain or len(pixels) <= _PART:
        output: Tensor = model(pixels)
        return output
    parts = [pixels[start : start + _PART] for start in range(0, len(pixels), _PART)]
    return torch.cat(map_on_cores(model, parts))


def map_on_cores(function: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
    """``[function(item) for item in items]`` without gradients, on as many threads as torch may use.

    Every call has one thread to itself, so its bits do not depend on the number of cores. Splitting each operation
    over the cores instead makes them wait for each other: three times slower on matrices of a few hundred rows.

    Example:
        >>> map_on_cores(lambda x: x + 1, [1, 2, 3])
        [2, 3, 4]
    """
    inference = torch.is_inference_mode_enabled()

    def call(item: _In) -> _Out:
        with torch.inference_mode(inference), torch.no_grad():  # both are a thread's own
            return function(item)

    threads = torch.get_num_threads()
    return [call(item) for item in items] if threads == 1 else list(_pool(threads).map(call, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "safemerge-core", initializer=torch.set_num_threads, initargs=(1,))
