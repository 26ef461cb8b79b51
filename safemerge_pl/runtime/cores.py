"""Work on the CPU with one thread per core: many small problems side by side instead of each one split."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["distances", "flat_parts", "forward_on_cores", "length_of", "map_on_cores"]

_In = TypeVar("_In")
_Out = TypeVar("_Out")

_FLAT_PART = 2**18
"""Entries per part of a tensor that is worked on element by element."""

_PART = 16
"""Images per part: activations of a small part stay in cache."""


def forward_on_cores(model: nn.Module, pixels: Tensor) -> Tensor:
    """Compute ``model(pixels)``, on the CPU with parts of the batch on separate threads.

    Splitting a batch keeps all cores busy where splitting each operation makes them wait for each other, above all
    when another program uses a core; on one thread it keeps the activations in cache. On other devices, with gradients
    or under autocast it is a plain call.

    Args:
        model: any module whose output has one row per image.
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
    return torch.cat(list(map_on_cores(model, parts)))


def flat_parts(tensor: Tensor, device: torch.device | None = None) -> tuple[Tensor, ...]:
    """Flatten a tensor, and for a CPU split it into parts that stay in a core's cache.

    Elementwise work on one part after another is several times faster than on a large tensor at once: intermediate
    results neither leave the cache nor ask the system for fresh memory.

    Args:
        tensor: of any shape.
        device: where the parts are worked on, if it is not where the tensor is.

    Returns:
        Flat parts in order; views where the tensor is contiguous.

    Example:
        >>> [len(part) for part in flat_parts(torch.zeros(2**10, 2**9))]
        [262144, 262144]
    """
    flat = tensor.reshape(-1)
    size = _FLAT_PART if (device or flat.device).type == "cpu" else max(len(flat), 1)
    parts: tuple[Tensor, ...] = torch.split(flat, size)
    return parts


def length_of(parts: Iterable[Tensor]) -> float:
    """Compute the Euclidean length of a vector that comes in parts, summed in double precision.

    Example:
        >>> length_of([torch.tensor([3.0]), torch.tensor([0.0, 4.0])])
        5.0
    """
    return math.hypot(*[float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts])


def distances(a: Tensor, b: Tensor) -> list[float]:
    """Compute the Euclidean length of each ``a[i] - b[i]``; on a GPU with one wait for all of them.

    Example:
        >>> distances(torch.eye(2), torch.tensor([[0.0, 0.0], [0.0, 4.0]]))
        [1.0, 3.0]
    """
    if a.device.type != "cpu":
        lengths: list[float] = torch.linalg.vector_norm((a - b).flatten(1), dim=1).tolist()
        return lengths
    return [length_of(x - y for x, y in zip(*map(flat_parts, pair), strict=True)) for pair in zip(a, b, strict=True)]


def map_on_cores(function: Callable[[_In], _Out], items: Sequence[_In], *, most: int | None = None) -> Iterator[_Out]:
    """Compute ``map(function, items)`` without gradients, on as many threads as torch may use.

    Every call has one thread to itself, so its bits do not depend on the number of cores. Splitting each operation
    over the cores instead makes them wait for each other: three times slower on matrices of a few hundred rows.

    Args:
        function: called with one item.
        items: in the order of the results.
        most: limit on calls at the same time, where each of them takes much memory.

    Returns:
        The results in the order of ``items``.

    Example:
        >>> list(map_on_cores(lambda x: x + 1, [1, 2, 3]))
        [2, 3, 4]
    """
    inference = torch.is_inference_mode_enabled()

    def call(item: _In) -> _Out:
        with torch.inference_mode(inference), torch.no_grad():  # these settings are per thread
            return function(item)

    threads = torch.get_num_threads() if most is None else min(torch.get_num_threads(), most)
    return map(call, items) if threads == 1 else _pool(threads).map(call, items)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "safemerge-core", initializer=_take_one_core)


def _take_one_core() -> None:
    """Give this thread one core for good; a call inside would otherwise wait for the threads that run it.

    torch copies the number of the whole process into a thread when it is first asked there, whatever was set before.
    So it is asked now: a number that somebody sets later does not reach this thread any more.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)
