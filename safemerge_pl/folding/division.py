"""How a merge is shared out among processes, and what they find out about it together."""

import functools
from collections.abc import Callable, MutableMapping
from functools import cached_property

import torch
from torch import Tensor

from safemerge_pl.checkpoints.differences import Likeness
from safemerge_pl.checkpoints.tensors import HASHED_AT_ONCE, LazyTensors, hash_each, hash_lines
from safemerge_pl.folding.engine import plan_fold
from safemerge_pl.folding.processes import Processes
from safemerge_pl.folding.selection import MergePlan
from safemerge_pl.folding.shares import divide_rest, divide_work
from safemerge_pl.methods.base import MergeMethod

__all__ = ["Division"]


class Division:
    """The parameters of a merge, shared out among processes; all of them make the same calls.

    Args:
        plan: what is merged.
        method: how.
        device: where.
        processes: among which it is shared out.
    """

    def __init__(self, plan: MergePlan, method: MergeMethod, device: torch.device, processes: Processes) -> None:
        self.plan, self.method, self.device, self.processes = plan, method, device, processes

    def is_of(self, processes: Processes, device: torch.device) -> bool:
        """Whether it is for these processes and this device."""
        return self.processes == processes and self.device == device

    @cached_property
    def owners(self) -> dict[str, int]:
        """Rank of the process that folds each parameter, and reads and writes each tensor that is not merged."""
        stacks, count = plan_fold(self.plan.layers, self.method, self.device), self.processes.count
        owners = divide_work(stacks, self.plan.others, count, whole=not self.method.concurrent)
        return owners | divide_rest(self.plan.pretrained.shapes(), owners, count)

    def is_own(self, name: str) -> bool:
        """Whether this process has a parameter's merged weights."""
        return not self.processes.apart or self.owners[name] == self.processes.rank

    def hash(self, read: Callable[[str], Tensor], together: bool) -> str:
        """Hash the layers inside the parameters that ``read`` gives, a few of which are held at a time.

        Args:
            read: gives a parameter.
            together: each process reads its own parameters alone; all of them make this call.

        Returns:
            64 hexadecimal digits, the same for any number of processes.

        Raises:
            PeerError: if ``read`` fails on another process; here its own exception.
        """
        # the parts of a fused tensor do not follow each other by name
        read = functools.lru_cache(4 + min(HASHED_AT_ONCE, torch.get_num_threads()))(read)
        layers = {layer.name: layer for layer in sorted(self.plan.units, key=lambda layer: layer.name)}

        def hash_them(names: list[str]) -> list[str]:
            tensors = LazyTensors(names, lambda name: layers[name].view(read(layers[name].parameter)))
            return hash_each(tensors, self.processes.check if together else lambda: None)

        if not together:
            return hash_lines(hash_them(list(layers)))
        own = [name for name, layer in layers.items() if self.owners[layer.parameter] == self.processes.rank]
        lines = self.processes.collect(lambda: dict(zip(own, hash_them(own), strict=True)))
        return hash_lines([lines[name] for name in layers])

    def collect_lengths(self, likeness: Likeness) -> dict[str, float]:
        """Collect the lengths of all layers, also of those that other processes have read."""
        return self.processes.collect(lambda: likeness.lengths) if self.processes.apart else likeness.lengths

    def spread(self, staged: MutableMapping[str, Tensor]) -> None:
        """Give the new weights to all processes, where each of them needs all.

        Args:
            staged: merged parameters of this process, float32; filled up here.
        """
        if self.method.concurrent and not self.processes.apart:  # of other methods every process has them already
            shapes = {name: self.plan.pretrained.shape(name) for name in self.plan.parameters}
            self.processes.spread(staged, shapes, self.owners, self.device)
