"""The order of tasks: the paper's table, and names that cannot be a stream."""

import random

import pytest

from safemerge_pl.data.stream import TaskStream

# paper, table of task orders (appendix); order k has the seed 41 + k
ORDERS = {
    (8, 42): "04 05 07 08 03 06 01 02",
    (8, 43): "07 08 05 04 02 06 03 01",
    (8, 44): "03 06 04 02 01 08 05 07",
    (8, 45): "06 08 02 01 03 07 04 05",
    (8, 46): "07 06 03 08 05 01 04 02",
    (8, 47): "07 02 03 08 05 04 01 06",
    (8, 48): "07 01 04 03 08 05 02 06",
    (8, 49): "08 05 06 07 01 04 03 02",
    (8, 50): "01 04 05 02 06 03 07 08",
    (8, 51): "08 03 01 02 06 05 07 04",
    (14, 42): "09 13 08 07 14 12 06 03 10 04 05 01 02 11",
    (14, 47): "03 12 13 01 11 04 10 05 14 08 09 07 02 06",
    (14, 51): "01 02 11 06 08 12 07 05 10 14 03 13 09 04",
    (20, 42): "20 06 15 05 10 14 16 19 07 13 18 11 02 12 03 17 08 09 01 04",
    (20, 46): "14 16 04 20 15 17 07 11 06 18 12 01 19 09 10 05 08 02 13 03",
    (20, 51): "01 11 02 15 03 10 12 19 16 13 07 05 09 04 14 20 06 18 17 08",
}


@pytest.mark.parametrize(("length", "seed"), ORDERS)
def test_the_orders_of_the_paper(length: int, seed: int) -> None:
    stream = TaskStream([f"{i:02}" for i in range(1, length + 1)], order_seed=seed)
    assert " ".join(stream) == ORDERS[length, seed]


def test_without_a_seed_the_order_is_as_given() -> None:
    stream = TaskStream(["b", "a", "c"])
    assert (list(stream), len(stream), stream[0], stream[2], stream.order_seed) == (["b", "a", "c"], 3, "b", "c", None)


def test_seed_zero_is_a_seed() -> None:
    tasks = [str(i) for i in range(20)]
    assert list(TaskStream(tasks, order_seed=0)) != tasks


def test_the_given_list_and_the_global_random_state_are_left_alone() -> None:
    tasks, state = ["a", "b", "c", "d"], random.getstate()
    first, second = TaskStream(tasks, 42), TaskStream(tasks, 42)
    assert list(first) == list(second)
    assert sorted(first) == tasks == ["a", "b", "c", "d"]
    tasks.append("e")
    assert len(first) == 4
    assert random.getstate() == state


@pytest.mark.parametrize("tasks", [["a", "b", "a"], ["mnist", "MNIST"], ["Straße", "STRASSE"]])
def test_names_must_differ_whatever_their_case(tasks: list[str]) -> None:
    """The twins are named."""
    with pytest.raises(ValueError, match=rf"distinct names, got .*{tasks[-1]}"):
        TaskStream(tasks)


def test_a_stream_needs_a_task() -> None:
    with pytest.raises(ValueError, match="`tasks` is empty"):
        TaskStream([])
