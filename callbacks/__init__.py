"""Another name for :mod:`safemerge_pl.callbacks`, so that ``class_path: callbacks.SAFEMergeCallback`` works here.

Only in a checkout: it is not installed, where it would hide behind (or hide) a ``callbacks`` folder of your own.
"""

from safemerge_pl.callbacks import ComparedMethod as ComparedMethod
from safemerge_pl.callbacks import DriftMonitor as DriftMonitor
from safemerge_pl.callbacks import MergeCallback as MergeCallback
from safemerge_pl.callbacks import MergedModelWriter as MergedModelWriter
from safemerge_pl.callbacks import MethodComparison as MethodComparison
from safemerge_pl.callbacks import ReferenceRows as ReferenceRows
from safemerge_pl.callbacks import SAFEMergeCallback as SAFEMergeCallback
from safemerge_pl.callbacks import StreamProgress as StreamProgress
from safemerge_pl.callbacks import StreamReport as StreamReport

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
