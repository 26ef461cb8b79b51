"""The interface of a merge method: stacks of matrices in, new merged matrices out."""

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from safemerge_pl.architectures.layers import Scope

__all__ = [
    "MergeMethod",
    "Scope",
    "Stack",
    "StackResult",
    "Vectors",
    "add_up",
    "clock",
    "energies",
    "mean_rule",
    "recovered_share",
    "require_numbers",
    "share_of",
]
_Out = TypeVar("_Out")


class Vectors(Protocol):
    """Make passes over everything that is merged, with little of it in memory at a time."""

    def __call__(self, look: Callable[[Iterator[tuple[Tensor, Tensor]]], _Out], /) -> Iterator[_Out]:
        """Yield what ``look`` returns for each tensor, in order.

        Args:
            look: gets flat parts of the accumulated and of the task vector; called on several threads at once where the
                method is ``concurrent``. Where several processes fold together each looks at its own tensors, and what
                ``look`` returns for all of them reaches every process; what it counts elsewhere is added up by
                :func:`add_up`.
        """
        ...


def add_up(vectors: Vectors, counts: Tensor) -> Tensor:
    """Add up what passes have counted on all processes of a fold; plain passes are of one process.

    Args:
        vectors: made the passes.
        counts: of this process, of the same shape on all of them, on the CPU.

    Returns:
        The sum, of that shape.

    Raises:
        RuntimeError: if another process of the fold is gone.
    """
    total: Callable[[Tensor], Tensor] | None = getattr(vectors, "add_up", None)
    return counts if total is None else total(counts)


@dataclass(frozen=True)
class Stack:
    r"""Layers of one shape at one step of the stream.

    Attributes:
        layers: canonical names, one per matrix.
        index: position of the incoming task in the stream, from 1.
        pretrained: :math:`\theta_0`, ``(L, d_out, d_in)``.
        merged: :math:`\theta^{merged}_{t-1}`, ``(L, d_out, d_in)``.
        incoming: :math:`\theta_t`, ``(L, d_out, d_in)``.
        cache: lives as long as the stream, or longer on disk; for what depends on ``pretrained`` and the name alone.
        counts: how many tasks have changed each layer, this one included; left out, all so far have.
    """

    layers: tuple[str, ...]
    index: int
    pretrained: Tensor
    merged: Tensor
    incoming: Tensor
    cache: MutableMapping[str, Tensor] = field(default_factory=dict)
    counts: tuple[int, ...] = ()

    @cached_property
    def task_counts(self) -> Tensor:
        """:attr:`counts` as a tensor that a stack can be divided by, ``(L, 1, 1)``, at least 1."""
        counts = self.counts or (self.index,) * len(self.layers)
        return torch.tensor(counts, dtype=torch.float32, device=self.pretrained.device).clamp_(min=1)[:, None, None]

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
    """The result of merging a :class:`Stack`.

    Attributes:
        merged: new merged weights, ``(L, d_out, d_in)``.
        kept_fraction: share of entries that were merged, ``(L,)``; ``None`` if all were.
        losses: ``(K + 1, L)`` losses of an inner optimisation; ``None`` without one.
        solve_seconds: wall time of the inner optimisation.
        taken: share of each squared task vector that the mask or filter lets through, ``(L,)``; ``None`` if all is.
        recovered: share of it that is made up for where it does not, ``(L,)``; ``None`` if none is. See
            :class:`~safemerge_pl.folding.fates.GroupShares`.
    """

    merged: Tensor
    kept_fraction: Tensor | None = None
    losses: Tensor | None = None
    solve_seconds: float = 0.0
    taken: Tensor | None = None
    recovered: Tensor | None = None


class MergeMethod(ABC):
    """One way to fold an incoming model into the merged one.

    Subclass it as a dataclass of plain values, validate in ``__post_init__``, and implement :meth:`fold_stack`. Name
    the class by ``class_path`` in a configuration; there is no registry to enter it in.
    """

    scope: ClassVar[Scope] = "selected"
    """Which matrices :meth:`fold_stack` gets."""

    merges_rest: ClassVar[bool] = False
    """Whether :meth:`fold_rest` gets every other floating-point tensor; else they keep their pretrained values."""

    concurrent: ClassVar[bool] = False
    """Whether :meth:`fold_stack` may work on several stacks at once on threads: it must then change nothing of the
    method itself."""

    elementwise: ClassVar[bool] = False
    """Whether :meth:`fold_rest` treats every entry by itself: it then gets a large tensor in parts, a few rows each."""

    max_response: ClassVar[float | None] = None
    """Bound on the response of the accumulated vector where the user gives none; ``None`` bounds nothing."""

    label: ClassVar[str]
    """Name in tables and figures."""

    def check_layers(self, shapes: Mapping[str, tuple[int, ...]]) -> None:  # noqa: B027  # most settings fit all shapes
        """Refuse matrices that the settings do not fit, before anything is read or folded.

        Args:
            shapes: ``(d_out, d_in)`` of every matrix that :meth:`fold_stack` will get, by canonical name.

        Raises:
            ValueError: naming the setting, the matrix and the remedy.
        """

    def prepare(self, index: int, vectors: Vectors) -> None:  # noqa: B027  # most methods have nothing to prepare
        """Look at the whole model before any tensor is folded; for methods with global thresholds or norms.

        Args:
            index: position of the incoming task in the stream, from 1.
            vectors: makes a pass over all tensors that will be merged, each time it is called.
        """

    @abstractmethod
    def fold_stack(self, stack: Stack) -> StackResult:
        """Merge one stack; must not change its tensors."""

    def fold_rest(self, stack: Stack) -> StackResult:
        """Merge one tensor of any shape, given as ``(1, *shape)``; only called where ``merges_rest`` is set."""
        raise NotImplementedError(f"{type(self).__name__} does not merge tensors outside its stacks.")

    def rescale(self, norm: float) -> float:
        """Compute a factor for the whole accumulated vector.

        Args:
            norm: length of the accumulated vector after all tensors are folded.
        """
        return 1.0

    def settings(self) -> dict[str, Any]:
        """Return the method's parameters as plain values, for reports, checkpoints and comparison on resume."""
        return dataclasses.asdict(self) if dataclasses.is_dataclass(self) else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive between two folds: plain values and tensors. Most methods need nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: if there is state that the method does not have.
        """
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got the keys {sorted(state)}.")


def mean_rule(stack: Stack) -> StackResult:
    """Average the accumulated and the task vector: the rule for what is not a matrix (docs/methods.md, the mean rule).

    Task ``i`` of ``T`` ends with the weight ``2 ** -(T - i + 1)``, the first with ``2 ** -(T - 1)``: early tasks fade.

    Example:
        >>> zero, one = torch.zeros(1, 2), torch.ones(1, 2)
        >>> mean_rule(Stack(("bias",), 2, zero, one, 3 * one)).merged.tolist()
        [[2.0, 2.0]]
    """
    if stack.index == 1:
        return StackResult(stack.incoming.clone())
    return StackResult(stack.pretrained + (stack.merged_vector + stack.task_vector) / 2)


def energies(matrices: Tensor) -> Tensor:
    """Compute the squared length of each matrix of a stack.

    Args:
        matrices: ``(L, ...)``.

    Returns:
        ``(L,)``, float64.

    Example:
        >>> energies(torch.tensor([[[3.0, 4.0]], [[0.0, 1.0]]])).tolist()
        [25.0, 1.0]
    """
    lengths: Tensor = torch.linalg.vector_norm(matrices.flatten(1), dim=1, dtype=torch.float64)
    return lengths.square()


def share_of(part: Tensor, whole: Tensor) -> Tensor:
    """Divide energies, matrix by matrix; the share of a matrix without any is 1.

    Args:
        part: ``(L,)``, from :func:`energies`.
        whole: ``(L,)``, likewise.

    Returns:
        ``(L,)``, in [0, 1].

    Example:
        >>> share_of(torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0])).tolist()
        [0.25, 1.0]
    """
    return torch.where(whole > 0, part / whole, 1.0).clamp_(0, 1)


def recovered_share(lost: Tensor, correction: Tensor, whole: Tensor) -> Tensor:
    r"""Find which share of the task vectors' energy a correction makes up for, in their leading directions.

    .. math:: \max(0, \|DV\|^2 - \|(D - C)V\|^2) / \|\tau\|^2

    Args:
        lost: :math:`DV`, what was not taken, in the leading directions, ``(L, d_out, r)``.
        correction: :math:`CV`, likewise.
        whole: :math:`\|\tau\|^2`, ``(L,)``, from :func:`energies`.

    Returns:
        ``(L,)``, at least 0; 0 where there is no task vector.

    Example:
        >>> lost, whole = torch.tensor([[[2.0]], [[0.0]]]), torch.tensor([8.0, 0.0])
        >>> recovered_share(lost, torch.tensor([[[1.0]], [[1.0]]]), whole).tolist()  # (4 - 1) / 8
        [0.375, 0.0]
    """
    regained = energies(lost) - energies(lost - correction)
    return torch.where(whole > 0, regained.clamp_(min=0) / whole, 0.0)


def clock(device: torch.device) -> float:
    """Read a clock in seconds, once everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def require_numbers(method: MergeMethod, *, whole: Sequence[str] = (), finite: Sequence[str] = ()) -> None:
    """Refuse settings that are not whole or not finite numbers.

    Raises:
        ValueError: naming the first such setting.
    """
    for name in whole:
        if not isinstance(getattr(method, name), int):
            raise ValueError(f"`{name}` must be a whole number, got {getattr(method, name)}.")
    for name in finite:
        if not math.isfinite(getattr(method, name)):
            raise ValueError(f"`{name}` must be a finite number, got {getattr(method, name)}.")
