"""SAFE-Merge: risk-aware masking, masked low-rank recovery, fusion (paper section 4, Algorithm 1)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from safemerge_pl.maths.linalg import complement_basis, right_singular_basis
from safemerge_pl.maths.masking import Keep, keep_mask, risk_score
from safemerge_pl.maths.recovery import RecoveryProblem, initial_factors, solve_recovery
from safemerge_pl.methods.base import (
    MergeMethod,
    Stack,
    StackResult,
    clock,
    energies,
    recovered_share,
    require_numbers,
    share_of,
)

__all__ = ["SafeMerge"]


@dataclass
class SafeMerge(MergeMethod):
    r"""SAFE-Merge with the paper's defaults for CLIP ViT-B/32 and eight tasks.

    Args:
        keep_ratio: :math:`\rho`, share of every layer's entries that is merged, in ``[0, 1]``. Lower keeps more general
            knowledge. Paper: 0.5 for 8 tasks, 0.3 for 14 and 20 (ViT-B/32).
        scoring_rank: :math:`r_p`, directions of the pretrained, merged and incoming weights that are compared.
        recovery_rank: :math:`r_l`, rank of the correction before it is masked.
        task_rank: :math:`r_v`, directions of the incoming task that recovery restores.
        plasticity: :math:`\lambda` in ``[0, 1]``: 1 learns the new task, 0 protects the old ones.
        regularization: :math:`\mu`, weight of the correction's size.
        num_steps: :math:`K`, Adam steps per task.
        lr: :math:`\eta`, Adam's learning rate.
        utility_weight: :math:`\beta`, weight of the task term of the risk: 1 is Eq. 6, 0 the general-only score of
            Eq. 4, which keeps more general knowledge in long streams.
        keep: ``"low"`` merges the least risky entries, ``"high"`` the riskiest (the paper's negative control).
        use_mask: ``False`` merges every entry (ablation).
        use_recovery: ``False`` leaves out the correction (ablation).
        seed: seeds the start of the correction, together with task position and layer name.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> SafeMerge(keep_ratio=1.5)
        Traceback (most recent call last):
        ValueError: `keep_ratio` must be in [0, 1], got 1.5.
    """

    label: ClassVar[str] = "SAFE-Merge"
    concurrent: ClassVar[bool] = True

    keep_ratio: float = 0.5
    scoring_rank: int = 128
    recovery_rank: int = 64
    task_rank: int = 8
    plasticity: float = 0.8
    regularization: float = 0.1
    num_steps: int = 50
    lr: float = 1e-3
    utility_weight: float = 1.0
    keep: Keep = "low"
    use_mask: bool = True
    use_recovery: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("keep_ratio", "plasticity"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"`{name}` must be in [0, 1], got {getattr(self, name)}.")
        for name in ("scoring_rank", "recovery_rank", "task_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        require_numbers(self, whole=("scoring_rank", "recovery_rank", "task_rank", "num_steps", "seed"))
        for name in ("regularization", "num_steps", "utility_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"`{name}` must be a finite number of at least 0, got {getattr(self, name)}.")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"`lr` must be a finite number above 0, got {self.lr}.")
        if self.keep not in ("low", "high"):
            raise ValueError(f"`keep` must be 'low' or 'high', got {self.keep!r}.")

    def fold_stack(self, stack: Stack) -> StackResult:
        """Mask, recover and fuse one stack (Eqs. 5-13).

        Example:
            >>> theta0 = torch.eye(4)[None]
            >>> stack = Stack(("vision.0.q",), 1, theta0, theta0, theta0 + 0.01)
            >>> result = SafeMerge(keep_ratio=0.5, use_recovery=False, scoring_rank=1, task_rank=1).fold_stack(stack)
            >>> result.merged.shape, 0.5 <= result.kept_fraction.item() <= 1
            (torch.Size([1, 4, 4]), True)
        """
        tau = stack.task_vector
        task_directions = right_singular_basis(tau, max(self.scoring_rank, self.task_rank))
        mask = self._mask(stack, task_directions[:, :, : self.scoring_rank])
        update = torch.where(mask, tau, 0.0)
        losses, seconds, recovered = None, 0.0, None
        whole = energies(tau)
        taken = share_of(energies(update), whole)
        if self.use_recovery:
            new_basis = task_directions[:, :, : self.task_rank]
            lost = (tau - update) @ new_basis
            correction, losses, seconds = self._recover(stack, mask, new_basis)
            recovered = recovered_share(lost, correction @ new_basis, whole)
            update += correction
        kept = mask.sum((1, 2)) / mask[0].numel()
        if not kept.all():  # at least one entry is kept unless scores are NaN or all infinite
            raise ArithmeticError("the risk scores are not finite; the task vector is too large")
        merged = torch.where(update == 0, stack.merged, stack.merged + update)  # -0.0 + 0.0 would be +0.0
        return StackResult(merged, kept, losses, seconds, taken, recovered)

    def _mask(self, stack: Stack, task_directions: Tensor) -> Tensor:
        """Step 1: the keep mask ``(L, d_out, d_in)`` from the directions ``(L, d_in, r_p)`` of the task vector."""
        if not self.use_mask:
            return torch.ones_like(stack.task_vector, dtype=torch.bool)
        key = f"general_basis/{self.scoring_rank}"
        if key not in stack.cache:
            stack.cache[key] = right_singular_basis(stack.pretrained, self.scoring_rank)
        general = stack.cache[key]
        task = complement_basis(task_directions, general) if self.utility_weight else None
        return keep_mask(risk_score(stack.task_vector, general, task, self.utility_weight), self.keep_ratio, self.keep)

    def _recover(self, stack: Stack, mask: Tensor, new_basis: Tensor) -> tuple[Tensor, Tensor, float]:
        """Step 2: the masked correction ``(L, d_out, d_in)``, its losses ``(K + 1, L)``, and the solver's seconds."""
        old_basis = right_singular_basis(stack.merged_vector, self.scoring_rank) if stack.index > 1 else None
        problem = RecoveryProblem.build(
            stack.task_vector,
            stack.merged_vector,
            mask,
            old_basis,
            new_basis,
            plasticity=self.plasticity,
            regularization=self.regularization,
        )
        d_out, d_in = stack.task_vector.shape[1:]
        rank = min(self.recovery_rank, d_out, d_in)
        start = initial_factors(stack.layers, rank, d_in, seed=self.seed, index=stack.index)
        begin = clock(mask.device)
        correction, losses = solve_recovery(problem, start, num_steps=self.num_steps, lr=self.lr)
        return correction, losses, clock(mask.device) - begin
