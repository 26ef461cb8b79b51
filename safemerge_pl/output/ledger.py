"""The ledger of an output: one line of strict JSON per fold, never rewritten."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from safemerge_pl.checkpoints.open import Checkpoint
from safemerge_pl.folding.report import FoldReport
from safemerge_pl.output.files import LEDGER_FILE
from safemerge_pl.runtime.files import local_path

__all__ = ["continue_ledger", "ledger_line", "provenance", "read_ledger"]


def ledger_line(report: FoldReport, method: str, settings: dict[str, Any]) -> str:
    """One fold, without its line break: what was folded from where, how, with which result, and when (UTC)."""
    entry = {
        "time": report.time,
        "version": report.version,
        "index": report.index,
        "task": report.task,
        "source": report.source,
        "path": report.path,
        "revision": report.revision,
        "incoming": report.incoming,
        "merged": report.merged,
        "method": method,
        "settings": settings,
        "kept_fraction": report.kept_fraction,
        **({} if report.response is None else {"response": report.response, "scale": report.scale}),
        **({} if report.drift is None else {"drift": report.drift}),
        **({"shares": [asdict(group) for group in report.shares]} if report.shares else {}),
        **({} if report.leading is None else {"leading": report.leading}),
        "loss_first": report.losses[0] if report.losses else None,
        "loss_last": report.losses[-1] if report.losses else None,
        "seconds": report.seconds,
        "notes": list(report.notes),
    }
    return json.dumps(entry, allow_nan=False)


def provenance(checkpoint: Checkpoint) -> dict[str, str | None]:
    """Where a model lay (resolved), its commit if it came from the hub, the time, and this package's version."""
    from safemerge_pl.version import __version__

    place = checkpoint.folder or local_path(checkpoint.source)
    known = checkpoint.folder is not None or place.exists()
    return {
        "path": str(place.resolve()) if known else None,
        "revision": place.name if place.parent.name == "snapshots" else None,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "version": __version__,
    }


def read_ledger(folder: Path) -> list[str]:
    """The lines of an output's ledger as they stand there; none if it has no ledger.

    Bytes that are no text are kept as surrogates, so that a damaged line is known as one.
    """
    path = folder / LEDGER_FILE
    return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if path.exists() else []


def continue_ledger(earlier: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Keep earlier lines verbatim as far as they tell of the same folds, and add new ones for the rest.

    Example:
        >>> old = ['{"index": 1, "merged": "a", "note": "by hand"}']
        >>> continue_ledger(old, ['{"index": 1, "merged": "a"}', '{"index": 2, "merged": "b"}'])
        ['{"index": 1, "merged": "a", "note": "by hand"}', '{"index": 2, "merged": "b"}']
    """
    pairs = itertools.takewhile(lambda pair: _fold(pair[0]) == _fold(pair[1]), zip(earlier, lines, strict=False))
    kept = [old for old, _ in pairs]
    return [*kept, *lines[len(kept) :]]


def _fold(line: str) -> tuple[Any, Any] | None:
    try:
        line.encode()  # damaged bytes cannot be written again
        entry = json.loads(line)
        return entry["index"], entry["merged"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
