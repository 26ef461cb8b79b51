"""Score the weights that a backbone holds."""

from safemerge_pl.scoring.scorer import Scorer as Scorer
from safemerge_pl.scoring.scorer import SetScore as SetScore
from safemerge_pl.scoring.scorer import ZeroShotScore as ZeroShotScore
from safemerge_pl.scoring.scorer import evaluating as evaluating
from safemerge_pl.scoring.scorer import expert_weights as expert_weights
from safemerge_pl.scoring.scorer import swapped_weights as swapped_weights

__all__ = [
    "Scorer",
    "SetScore",
    "ZeroShotScore",
    "evaluating",
    "expert_weights",
    "swapped_weights",
]
