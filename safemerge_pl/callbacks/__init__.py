"""Lightning callbacks, one per file."""

from safemerge_pl.callbacks.merge import MergeCallback as MergeCallback
from safemerge_pl.callbacks.output import MergedModelWriter as MergedModelWriter
from safemerge_pl.callbacks.progress import StreamProgress as StreamProgress
from safemerge_pl.callbacks.references import ReferenceRows as ReferenceRows
from safemerge_pl.callbacks.report import StreamReport as StreamReport
from safemerge_pl.callbacks.safe_merge import SAFEMergeCallback as SAFEMergeCallback

__all__ = [
    "MergeCallback",
    "MergedModelWriter",
    "ReferenceRows",
    "SAFEMergeCallback",
    "StreamProgress",
    "StreamReport",
]
