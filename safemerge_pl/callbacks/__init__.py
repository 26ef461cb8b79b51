"""Lightning callbacks, one per file."""

from safemerge_pl.callbacks.compare import ComparedMethod as ComparedMethod
from safemerge_pl.callbacks.compare import MethodComparison as MethodComparison
from safemerge_pl.callbacks.drift import DriftMonitor as DriftMonitor
from safemerge_pl.callbacks.merge import MergeCallback as MergeCallback
from safemerge_pl.callbacks.output import MergedModelWriter as MergedModelWriter
from safemerge_pl.callbacks.progress import StreamProgress as StreamProgress
from safemerge_pl.callbacks.references import ReferenceRows as ReferenceRows
from safemerge_pl.callbacks.report import StreamReport as StreamReport
from safemerge_pl.callbacks.safe_merge import SAFEMergeCallback as SAFEMergeCallback

__all__ = [
    "ComparedMethod",
    "DriftMonitor",
    "MergeCallback",
    "MergedModelWriter",
    "MethodComparison",
    "ReferenceRows",
    "SAFEMergeCallback",
    "StreamProgress",
    "StreamReport",
]
