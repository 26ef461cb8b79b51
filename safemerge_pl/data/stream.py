"""The order in which tasks arrive."""

import random
from collections.abc import Iterator, Sequence

from safemerge_pl.runtime.names import name_list

__all__ = ["TaskStream"]


class TaskStream:
    """Names of the tasks in the order in which they are merged.

    Args:
        tasks: distinct names; a single string is one name.
        order_seed: shuffles the names with ``random.Random(order_seed)``; the seeds 42 to 51 give the ten orders of the
            paper's table of task orders. ``None`` keeps the order as given.

    Raises:
        ValueError: if there is no task, two share a name, or something in the list is no name.

    Example:
        >>> list(TaskStream(["1", "2", "3", "4", "5", "6", "7", "8"], order_seed=42))
        ['4', '5', '7', '8', '3', '6', '1', '2']
    """

    def __init__(self, tasks: str | Sequence[str], order_seed: int | None = None) -> None:
        names = name_list(tasks, "tasks")
        if not names:
            raise ValueError("`tasks` is empty: a stream needs at least one task.")
        folded = [name.casefold() for name in names]
        twins = sorted({name for name in names if folded.count(name.casefold()) > 1})
        if twins:
            raise ValueError(f"`tasks` must have distinct names, got {', '.join(twins)} more than once.")
        if order_seed is not None:
            random.Random(order_seed).shuffle(names)
        self.names = tuple(names)
        self.order_seed = order_seed

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, index: int) -> str:
        return self.names[index]
