"""OPCM, orthogonal projection-based continual merging (Tang et al. 2025; docs/methods.md, OPCM)."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from safemerge_pl.maths.linalg import thin_svd
from safemerge_pl.methods.base import MergeMethod, Scope, Stack, StackResult, Vectors, energies, share_of
from safemerge_pl.runtime.cores import length_of

__all__ = ["OPCM", "project_out"]


@dataclass
class OPCM(MergeMethod):
    r"""Project the incoming vector away from the accumulated one's leading subspace, and keep the total length.

    In every linear layer the block of :math:`U^\top\tau V` that belongs to the share ``alpha`` of the accumulated
    vector's spectrum is removed; the rest is added to :math:`\lambda_{t-1}\bar\tau`, all other tensors unprojected;
    then everything is scaled so that its length is the mean length of all task vectors so far.

    Args:
        alpha: share of the sum of singular values that is protected, in ``[0, 1)``.
        zero_diagonal: also remove the diagonal of :math:`U^\top\tau V`, as the method is published; the code behind the
            paper's table does not.

    Raises:
        ValueError: if ``alpha`` is out of range.
    """

    label: ClassVar[str] = "OPCM"
    concurrent: ClassVar[bool] = True
    scope: ClassVar[Scope] = "linear"
    merges_rest: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    alpha: float = 0.5
    zero_diagonal: bool = False
    _lambda: float = field(default=1.0, init=False, repr=False)
    _mean_norm: float = field(default=0.0, init=False, repr=False)
    _count: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha < 1.0:
            raise ValueError(f"`alpha` must be in [0, 1), got {self.alpha}: at 1 nothing would be projected.")

    def settings(self) -> dict[str, Any]:
        """Return the settings without the state."""
        return {"alpha": self.alpha, "zero_diagonal": self.zero_diagonal}

    def prepare(self, index: int, vectors: Vectors) -> None:
        """Update the running mean with the length of the whole task vector."""
        if index == 1:  # a new stream
            self._lambda, self._mean_norm, self._count = 1.0, 0.0, 0
        norm = math.hypot(*vectors(lambda parts: length_of(task for _, task in parts)))
        self._count += 1
        self._mean_norm += (norm - self._mean_norm) / self._count

    def fold_stack(self, stack: Stack) -> StackResult:
        """Project and add one stack."""
        if stack.index == 1:
            return StackResult(stack.incoming.clone())
        clean = project_out(stack.task_vector, stack.merged_vector, self.alpha, zero_diagonal=self.zero_diagonal)
        taken = share_of(energies(clean), energies(stack.task_vector))
        return StackResult(stack.pretrained + self._lambda * stack.merged_vector + clean, taken=taken)

    def fold_rest(self, stack: Stack) -> StackResult:
        """Add one tensor."""
        if stack.index == 1:
            return StackResult(stack.incoming.clone())
        return StackResult(stack.pretrained + self._lambda * stack.merged_vector + stack.task_vector)

    def rescale(self, norm: float) -> float:
        """Scale the accumulated vector to the mean length of the task vectors."""
        if self._count == 1 or norm == 0 or self._mean_norm == 0:
            self._lambda = 1.0
            return 1.0
        self._lambda = norm / self._mean_norm
        return self._mean_norm / norm

    def state_dict(self) -> dict[str, Any]:
        """Return the running mean and the last scale."""
        return {"lambda": self._lambda, "mean_norm": self._mean_norm, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._lambda, self._mean_norm = float(state["lambda"]), float(state["mean_norm"])
        self._count = int(state["count"])


def project_out(task: Tensor, merged: Tensor, alpha: float, *, zero_diagonal: bool = False) -> Tensor:
    r"""Remove from task vectors their part in the leading subspace of the accumulated ones, by thin SVDs.

    :math:`\tau - U_r(U_r^\top\tau V_r)V_r^\top`, where ``r`` components hold at most the share ``alpha`` of the sum of
    singular values (the component that crosses it is not protected).

    Args:
        task: ``(L, d_out, d_in)``.
        merged: ``(L, d_out, d_in)``.
        alpha: share in ``[0, 1)``.
        zero_diagonal: also remove :math:`u_i^\top\tau v_i` beyond the block.

    Example:
        >>> merged = torch.diag(torch.tensor([3.0, 2.0, 1.0]))[None]
        >>> project_out(torch.ones(1, 3, 3), merged, 0.5).tolist()  # 3/6 does not exceed 0.5, so one component is kept
        [[[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]]
    """

    def is_protected(s: Tensor) -> Tensor:
        total = s.sum(1, keepdim=True)
        return torch.where(total > 0, s.cumsum(1) / total, 1.0) <= alpha

    # the block needs no more columns than any layer protects
    u, s, v = thin_svd(merged, None if zero_diagonal else lambda s: int(is_protected(s).sum(1).max()))
    block = is_protected(s)
    columns = block[:, None, : u.shape[2]]
    wide = task.double()
    left, right = torch.where(columns, u, 0.0), torch.where(columns, v, 0.0)
    clean = wide - left @ ((left.mT @ wide @ right) @ right.mT)
    if zero_diagonal:
        diagonal = torch.where(block | (s <= 0), 0.0, ((u.mT @ wide) * v.mT).sum(2))
        clean = clean - (u * diagonal[:, None]) @ v.mT
    return clean.to(task.dtype)
