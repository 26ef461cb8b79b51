"""Share a merge out among processes by what it costs; the same shares on every process, whatever its speed."""

import heapq
import math
from collections.abc import Mapping, Sequence

from safemerge_pl.architectures.layers import MergeLayer

__all__ = ["deal_out", "divide_rest", "divide_work", "fold_cost"]

_PER_ENTRY = 500
"""Reading, hashing, checking and writing one weight, in multiplications of a matrix product that take as long."""

_SOLVING = 2500
"""The inner optimisation and the masks, per weight of a matrix that is merged in a stack, likewise."""

_DECOMPOSING = 2
"""An eigendecomposition of a Gram matrix, in products of its size, beside the one that makes it."""


def fold_cost(shape: Sequence[int], *, stacked: bool) -> float:
    r"""Estimate what a fold of one tensor costs, in multiplications.

    A matrix in a stack costs its Gram matrix, :math:`mn^2` for the longer side :math:`m` and the shorter :math:`n`, its
    decomposition, :math:`2n^3`, and 3000 multiplications per weight for the inner optimisation, masks and files. The
    numbers are fitted to SAFE-Merge on a CPU: a feed-forward matrix of ViT-B/32 costs three attention matrices, one of
    Llama-3.2-3B two. Whatever is merged entry by entry costs 500 per weight.

    Args:
        shape: of the tensor.
        stacked: merged as a matrix in a stack; else entry by entry.

    Example:
        >>> attention, up = (fold_cost(shape, stacked=True) for shape in ((768, 768), (3072, 768)))
        >>> round(up / attention, 1), fold_cost((10,), stacked=False)
        (3.1, 5000)
    """
    entries = math.prod(shape)
    if not stacked or len(shape) != 2:
        return _PER_ENTRY * entries
    short = min(shape)
    return entries * (short + _SOLVING + _PER_ENTRY) + _DECOMPOSING * short**3


def divide_work(
    stacks: Sequence[Sequence[MergeLayer]], others: Sequence[MergeLayer], count: int, *, whole: bool = False
) -> dict[str, int]:
    """Give each parameter to a process, which reads, folds, holds and writes it.

    Parameters that meet in a stack stay together, and so do all parts of a fused one: what is in a stack must not
    depend on the number of processes. Of these groups the most expensive goes first, each to whoever has least so far.

    Args:
        stacks: layers that are folded together.
        others: tensors that are folded one by one.
        count: number of processes.
        whole: give everything to the first.

    Returns:
        Rank of the process that owns each parameter.

    Example:
        >>> q, k, up = (MergeLayer(n, n, (rows, 8)) for n, rows in (("q", 8), ("k", 8), ("up", 64)))
        >>> divide_work([(q,), (k,), (up,)], [], 2)
        {'q': 1, 'k': 1, 'up': 0}
        >>> divide_work([(q, k), (up,)], [], 2)["q"] == divide_work([(q, k), (up,)], [], 2)["k"]
        True
    """
    joined: dict[str, str] = {}

    def first(name: str) -> str:
        while joined.setdefault(name, name) != name:
            name = joined[name]
        return name

    costs: dict[str, float] = {}
    for stacked, group in ((True, stacks), (False, [(layer,) for layer in others])):
        for stack in group:
            for layer in stack:
                joined[first(layer.parameter)] = first(stack[0].parameter)
                costs[layer.parameter] = costs.get(layer.parameter, 0) + fold_cost(layer.shape, stacked=stacked)
    groups: dict[str, float] = {}
    for name, cost in costs.items():
        groups[first(name)] = groups.get(first(name), 0) + cost
    owners = deal_out(groups, [0.0] * (1 if whole else count))
    return {name: owners[first(name)] for name in costs}


def divide_rest(shapes: Mapping[str, Sequence[int]], owners: Mapping[str, int], count: int) -> dict[str, int]:
    """Give each tensor that is not merged, but compared and copied, to whoever has the fewest weights to write.

    Args:
        shapes: of the whole model.
        owners: rank of the process that owns each parameter that is merged.
        count: number of processes.

    Returns:
        Rank of the process that reads and writes each of the others.

    Example:
        >>> divide_rest({"q": (8, 8), "embedding": (50, 8), "norm": (8,)}, {"q": 0}, 2)
        {'embedding': 1, 'norm': 0}
    """
    loads = [0.0] * count
    for name, rank in owners.items():
        loads[rank] += 2 * math.prod(shapes[name])  # as it is deployed, and its float32 master
    return deal_out({name: math.prod(shape) for name, shape in shapes.items() if name not in owners}, loads)


def deal_out(costs: Mapping[str, float], loads: Sequence[float]) -> dict[str, int]:
    """Deal out pieces of work, the most expensive first, each to whoever has least; of equal ones to the first.

    Args:
        costs: of the pieces, by name.
        loads: what each process has already.

    Returns:
        Rank of the process that gets each piece.

    Example:
        >>> deal_out({"a": 1, "b": 4, "c": 2}, [0, 0])
        {'b': 0, 'c': 1, 'a': 1}
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    found = {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        load, rank = heapq.heappop(heap)
        found[name] = rank
        heapq.heappush(heap, (load + costs[name], rank))
    return found
