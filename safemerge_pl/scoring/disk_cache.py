"""Scores of large image sets kept on disk, so that an interrupted or repeated evaluation measures only what is new."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from safemerge_pl.backbones.base import Backbone, cache_key
from safemerge_pl.checkpoints.open import fingerprint
from safemerge_pl.runtime.disk_cache import cache_file, cache_folder
from safemerge_pl.runtime.files import write_json
from safemerge_pl.version import __version__

__all__ = ["keep_score", "read_score", "score_file"]


def score_file(backbone: Backbone, examples: Any) -> Path | None:
    """File of a score, under a hash of all weights, the head's texts, the set's files, device and versions.

    Args:
        backbone: with the weights to score.
        examples: the set. Only image sets that lie in files of their own are worth keeping.

    Returns:
        ``None`` where nothing is kept.
    """
    files = getattr(getattr(examples, "rows", None), "cache_files", None)
    if cache_folder() is None or not files or not hasattr(examples, "classes"):
        return None
    text = backbone.text_key()
    if text is None:
        return None
    stats = [(file["filename"], os.stat(file["filename"])) for file in files]
    content = [
        *(__version__, torch.__version__, cache_key(backbone), text),
        fingerprint(backbone.state_dict()),
        next(backbone.parameters()).device.type,
        *(examples.classes, examples.templates, len(examples)),
        [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
    ]
    return cache_file("scores", content, "json")


def read_score(file: Path | None) -> float | None:
    """A score that was kept; a damaged file is as good as none."""
    try:
        return None if file is None else float(json.loads(file.read_text())["score"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_score(file: Path | None, score: float) -> None:
    """Keep a score, unless the file cannot be written: then the next run measures it again."""
    if file is not None:
        with suppress(OSError):
            write_json(file, {"score": score})
