"""What every merge method is made of: stacks of matrices in, new merged matrices out."""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

from torch import Tensor

__all__ = ["MergeMethod", "Scope", "Stack", "StackResult"]

Scope = Literal["selected"]


@dataclass(frozen=True)
class Stack:
    r"""Layers of one shape at one step of the stream.

    Attributes:
        layers: canonical names, one per matrix.
        index: position of the incoming task in the stream, from 1.
        pretrained: :math:`\theta_0`, ``(L, d_out, d_in)``.
        merged: :math:`\theta^{merged}_{t-1}`, ``(L, d_out, d_in)``.
        incoming: :math:`\theta_t`, ``(L, d_out, d_in)``.
        cache: lives as long as the stream; for what depends on ``pretrained`` alone.
    """

    layers: tuple[str, ...]
    index: int
    pretrained: Tensor
    merged: Tensor
    incoming: Tensor
    cache: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def task_vector(self) -> Tensor:
        r""":math:`\tau_t = \theta_t - \theta_0`, ``(L, d_out, d_in)``."""
        return self.incoming - self.pretrained

    @cached_property
    def merged_vector(self) -> Tensor:
        r""":math:`\bar\tau_{t-1} = \theta^{merged}_{t-1} - \theta_0`, ``(L, d_out, d_in)``."""
        return self.merged - self.pretrained


@dataclass(frozen=True)
class StackResult:
    """What a method made of a :class:`Stack`.

    Attributes:
        merged: new merged weights, ``(L, d_out, d_in)``.
        kept_fraction: share of entries that were merged, ``(L,)``; ``None`` where a method keeps all.
        losses: ``(K + 1, L)`` losses of an inner optimisation; ``None`` where there is none.
    """

    merged: Tensor
    kept_fraction: Tensor | None = None
    losses: Tensor | None = None


class MergeMethod(ABC):
    """One way to fold an incoming model into the merged one.

    Subclass it as a dataclass of plain values, validate in ``__post_init__``, and implement :meth:`fold_stack`. Name
    the class by ``class_path`` in a configuration; there is no registry to enter it in.
    """

    scope: ClassVar[Scope] = "selected"
    """Which parameters the method merges: ``"selected"``, the layers of :mod:`safemerge_pl.layers`. All others keep
    their pretrained values."""

    label: ClassVar[str]
    """Name in tables and figures."""

    @abstractmethod
    def fold_stack(self, stack: Stack) -> StackResult:
        """Merge one stack; must not change its tensors."""

    def settings(self) -> dict[str, Any]:
        """The method's parameters as plain values, for reports, checkpoints and comparison on resume."""
        return dataclasses.asdict(self) if dataclasses.is_dataclass(self) else {}

    def state_dict(self) -> dict[str, Any]:
        """Whatever must survive between two folds: plain values and tensors. Most methods need nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got the keys {sorted(state)}.")
