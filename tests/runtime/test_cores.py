"""Work on several threads gives the bits of one, whatever the number of cores."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from safemerge_pl.runtime import cores
from safemerge_pl.runtime.cores import distances, flat_parts, forward_on_cores, length_of, map_on_cores


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads that torch may use."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_results_come_in_order_each_from_one_thread(threads: int) -> None:
    def work(item: int) -> tuple[int, int, bool]:
        time.sleep(0.01 * (3 - item % 4))  # later ones end first
        return item, torch.get_num_threads(), torch.is_grad_enabled()

    assert list(map_on_cores(work, range(8))) == [(item, 1, False) for item in range(8)]


def test_a_number_of_threads_that_is_set_later_does_not_reach_them(threads: int) -> None:
    """Or calls inside of calls would wait for each other for ever."""
    cores._pool.cache_clear()  # threads that nothing was asked of yet
    assert list(map_on_cores(lambda item: item, range(3))) == [0, 1, 2]
    torch.set_num_threads(threads)
    assert list(map_on_cores(lambda _: torch.get_num_threads(), range(3))) == [1, 1, 1]


def test_calls_share_the_inference_mode_of_their_caller(threads: int) -> None:
    def work(item: int) -> bool:
        return torch.is_inference_mode_enabled()

    assert list(map_on_cores(work, range(4))) == [False] * 4
    with torch.inference_mode():
        assert list(map_on_cores(work, range(4))) == [True] * 4


@pytest.mark.parametrize("most", [None, 1, 2])
def test_no_more_calls_at_a_time_than_allowed(threads: int, most: int | None) -> None:
    running, highest, lock = 0, 0, threading.Lock()

    def work(item: int) -> None:
        nonlocal running, highest
        with lock:
            running += 1
            highest = max(highest, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    list(map_on_cores(work, range(8), most=most))
    assert highest == min(threads, most or threads)


def test_an_error_reaches_the_caller(threads: int) -> None:
    def work(item: int) -> int:
        if item == 2:
            raise ArithmeticError(f"item {item}")
        return item

    with pytest.raises(ArithmeticError, match="item 2"):
        list(map_on_cores(work, range(5)))


@pytest.mark.parametrize("count", [0, 1, 16, 17, 50])
def test_a_batch_in_parts_equals_the_batch(threads: int, count: int) -> None:
    """Its parts go through the model one by one, so their bits are those of parts of that size."""
    model, sizes = nn.Linear(6, 4), []
    model.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    pixels = randn(count, 6)
    with torch.no_grad():
        found = forward_on_cores(model, pixels)
        expected = [nn.functional.linear(part, model.weight, model.bias) for part in pixels.split(16)]
    assert torch.equal(found, torch.cat(expected))
    assert sorted(sizes, reverse=True) == [len(part) for part in pixels.split(16)]


def test_a_forward_with_gradients_or_autocast_is_a_plain_call(threads: int) -> None:
    """Neither is known to another thread."""
    model, sizes = nn.Linear(6, 4), []
    model.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    forward_on_cores(model, randn(40, 6)).sum().backward()
    assert model.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert forward_on_cores(model, randn(40, 6)).dtype == torch.bfloat16
    assert sizes == [40, 40]


@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 3), (2, 3, 4)])
def test_flat_parts_are_all_entries_in_order(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_FLAT_PART", 4)
    tensor = randn(*shape)
    parts = flat_parts(tensor)
    assert torch.equal(torch.cat(parts), tensor.flatten())
    assert all(len(part) <= 4 for part in parts)
    assert len(flat_parts(tensor, torch.device("meta"))) == 1  # a device that is not the CPU takes it whole
    for part in parts:
        part.zero_()
    assert not tensor.any()  # parts of a contiguous tensor are views


def test_lengths_are_summed_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """In single precision adding 1 to 2^24 changes nothing, and the square of 1e-25 is 0."""
    parts = randn(1000).split(300)
    assert length_of(parts) == pytest.approx(float(torch.cat(parts).double().norm()), rel=1e-12)
    assert length_of(torch.full((2**13,), 1e-25).split(100)) == pytest.approx(1e-25 * 2**6.5)
    assert length_of([torch.tensor([4096.0]), *([torch.ones(1)] * 3)]) == pytest.approx((2**24 + 3) ** 0.5, rel=1e-12)
    assert length_of([]) == 0
    monkeypatch.setattr(cores, "_FLAT_PART", 4)
    a, b = randn(3, 5, 4), randn(3, 5, 4, seed=1)
    expected = [float((x.double() - y.double()).norm()) for x, y in zip(a, b, strict=True)]
    assert distances(a, b) == pytest.approx(expected, rel=1e-6)
