"""Lightning's remarks on what is intended here."""

import logging
import warnings

from safemerge_pl.runtime.console import is_quiet

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
        logging.getLogger(name).addFilter(_is_worth_saying)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Leave out hints, what the command line says itself, and in quiet runs all that is no problem."""
    text = record.getMessage()
    known = "Tip:" in text or "Detected KeyboardInterrupt" in text
    return not known and (record.levelno >= logging.WARNING or not is_quiet())
