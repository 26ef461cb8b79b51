"""Score the weights that a backbone holds."""

from safemerge_pl.runtime.modes import evaluating as evaluating
from safemerge_pl.scoring.drift import DriftGauge as DriftGauge
from safemerge_pl.scoring.drift import feature_drift as feature_drift
from safemerge_pl.scoring.file_gauge import FileGauge as FileGauge
from safemerge_pl.scoring.scorer import Scorer as Scorer
from safemerge_pl.scoring.weights import expert_weights as expert_weights
from safemerge_pl.scoring.weights import swapped_weights as swapped_weights

__all__ = ["DriftGauge", "FileGauge", "Scorer", "evaluating", "expert_weights", "feature_drift", "swapped_weights"]
