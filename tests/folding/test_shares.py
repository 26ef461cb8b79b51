"""Work shared out by cost."""

from typing import Any

import pytest

from safemerge_pl.architectures.layers import MergeLayer
from safemerge_pl.folding.shares import deal_out, divide_work, fold_cost


def layer(name: str, *shape: int, parameter: str = "", **more: Any) -> MergeLayer:
    return MergeLayer(name, parameter or name, shape, **more)


def llama(blocks: int) -> list[tuple[MergeLayer, ...]]:
    shapes = {"q": (3072, 3072), "k": (1024, 3072), "v": (1024, 3072), "o": (3072, 3072)}
    shapes |= {"gate": (8192, 3072), "up": (8192, 3072)}
    return [(layer(f"{block}.{name}", *shape),) for block in range(blocks) for name, shape in shapes.items()]


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_shares_cost_the_same(count: int) -> None:
    stacks = llama(28)
    owners = divide_work(stacks, [], count)
    loads = [0.0] * count
    for (one,) in stacks:
        loads[owners[one.parameter]] += fold_cost(one.shape, stacked=True)
    assert set(owners.values()) == set(range(count))
    assert max(loads) < 1.02 * min(loads)


def test_a_stack_and_a_fused_tensor_stay_whole() -> None:
    q, k = (layer(name, 4, 4, parameter="qkv", rows=rows) for name, rows in (("q", (0, 4)), ("k", (4, 8))))
    a, b, c = layer("a", 4, 4), layer("b", 4, 4), layer("c", 8, 4)
    owners = divide_work([(a, q), (k, b), (c,)], [layer("d", 4)], 3)
    assert owners["a"] == owners["qkv"] == owners["b"] != owners["c"]
    assert set(owners) == {"a", "b", "c", "d", "qkv"}


def test_whole_work_goes_to_the_first() -> None:
    assert set(divide_work(llama(1), [layer("norm", 3072)], 3, whole=True).values()) == {0}


def test_an_embedding_that_is_merged_costs_less_than_a_small_matrix_in_a_stack() -> None:
    """Of the same number of weights."""
    assert fold_cost((1024, 1024), stacked=False) < 0.2 * fold_cost((1024, 1024), stacked=True)


def test_dealing_starts_from_what_everybody_has() -> None:
    assert deal_out({"embedding": 5.0, "norm": 1.0}, [10.0, 3.0]) == {"embedding": 1, "norm": 1}
