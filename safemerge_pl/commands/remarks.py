"""Lightning's remarks on what is intended here."""

import logging
import warnings

__all__ = ["silence_known_warnings"]


def silence_known_warnings() -> None:
    """Leave out what Lightning remarks on each run of a stream, where nothing is trained and loaders are small."""
    for message in (
        ".*this fit will run with no optimizer.*",
        ".*does not have many workers.*",
        ".*Found .* module\\(s\\) in eval mode.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "Tip:" not in record.getMessage())
