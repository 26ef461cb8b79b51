"""Open any model lazily, and match it to the pretrained model's names."""

from safemerge_pl.checkpoints.names import match_names as match_names
from safemerge_pl.checkpoints.open import Source as Source
from safemerge_pl.checkpoints.open import open_checkpoint as open_checkpoint
from safemerge_pl.checkpoints.tensors import Checkpoint as Checkpoint
from safemerge_pl.checkpoints.tensors import fingerprint as fingerprint
from safemerge_pl.errors import CheckpointError as CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Source",
    "fingerprint",
    "match_names",
    "open_checkpoint",
]
