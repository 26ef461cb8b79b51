"""SAFE-Merge at each task boundary."""

from typing_extensions import Unpack

from safemerge_pl.callbacks.merge import MergeCallback
from safemerge_pl.callbacks.options import LiveOptions
from safemerge_pl.checkpoints.differences import Mismatch
from safemerge_pl.folding.bound import MaxResponse
from safemerge_pl.maths.masking import Keep
from safemerge_pl.methods import SafeMerge

__all__ = ["SAFEMergeCallback"]


class SAFEMergeCallback(MergeCallback):
    r"""Fold one model after another by SAFE-Merge: from checkpoints, or as a training loop makes them.

    Args:
        experts: see :class:`MergeCallback`.
        keep_ratio: :math:`\rho`, share of every layer's entries that is merged, in ``[0, 1]``.
        scoring_rank: :math:`r_p`, directions compared to find risky entries.
        recovery_rank: :math:`r_l`, rank of the correction before it is masked.
        task_rank: :math:`r_v`, directions of the incoming task that recovery restores.
        plasticity: :math:`\lambda` in ``[0, 1]``: 1 learns the new task, 0 protects the old ones.
        regularization: :math:`\mu`, weight of the correction's size.
        num_steps: :math:`K`, Adam steps per task.
        lr: :math:`\eta`, Adam's learning rate.
        utility_weight: :math:`\beta`, 1 is the paper's score (Eq. 6), 0 the general-only score (Eq. 4).
        keep: ``"low"`` merges the least risky entries, ``"high"`` the riskiest (negative control).
        use_mask: ``False`` merges every entry (ablation).
        use_recovery: ``False`` leaves out the correction (ablation).
        seed: seeds the start of the correction.
        layers: see :class:`MergeCallback`.
        module_attr: see :class:`MergeCallback`.
        device: see :class:`MergeCallback`.
        on_mismatch: see :class:`MergeCallback`.
        max_response: see :class:`MergeCallback`; SAFE-Merge itself has no bound, as in the paper.
        max_drift: see :class:`MergeCallback`.
        **live: merge what the loop trains, see :class:`LiveOptions`.

    Example:
        >>> SAFEMergeCallback(keep_ratio=0.3).method.keep_ratio
        0.3
        >>> SAFEMergeCallback(epochs_per_task=5, module_attr="encoder").live.epochs_per_task
        5
    """

    def __init__(
        self,
        experts: str | list[str] | dict[str, str] = "zoo",
        keep_ratio: float = 0.5,
        scoring_rank: int = 128,
        recovery_rank: int = 64,
        task_rank: int = 8,
        plasticity: float = 0.8,
        regularization: float = 0.1,
        num_steps: int = 50,
        lr: float = 1e-3,
        utility_weight: float = 1.0,
        keep: Keep = "low",
        use_mask: bool = True,
        use_recovery: bool = True,
        seed: int = 0,
        layers: list[str] | str | None = None,
        module_attr: str | None = None,
        device: str = "auto",
        on_mismatch: Mismatch = "error",
        max_response: MaxResponse = "auto",
        max_drift: float | None = None,
        **live: Unpack[LiveOptions],
    ) -> None:
        if "method" in live:
            raise ValueError("SAFEMergeCallback merges by SAFE-Merge; give `method` to MergeCallback instead.")
        method = SafeMerge(
            keep_ratio=keep_ratio,
            scoring_rank=scoring_rank,
            recovery_rank=recovery_rank,
            task_rank=task_rank,
            plasticity=plasticity,
            regularization=regularization,
            num_steps=num_steps,
            lr=lr,
            utility_weight=utility_weight,
            keep=keep,
            use_mask=use_mask,
            use_recovery=use_recovery,
            seed=seed,
        )
        super().__init__(method, experts, layers, module_attr, device, on_mismatch, max_response, max_drift, **live)
