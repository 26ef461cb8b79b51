"""Data-free continual model merging on PyTorch Lightning.

Names are imported when they are first used, so that ``import safemerge_pl`` and ``safemerge --help`` cost nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from safemerge_pl.version import __version__ as __version__

if TYPE_CHECKING:
    from safemerge_pl import callbacks as callbacks
    from safemerge_pl import functional as functional
    from safemerge_pl import metrics as metrics
    from safemerge_pl.live import LiveMerger as LiveMerger
    from safemerge_pl.merger import ContinualMerger as ContinualMerger
    from safemerge_pl.merger import FoldReport as FoldReport
    from safemerge_pl.methods import NUFILT as NUFILT
    from safemerge_pl.methods import OPCM as OPCM
    from safemerge_pl.methods import TSVM as TSVM
    from safemerge_pl.methods import IsoC as IsoC
    from safemerge_pl.methods import KnOTSTies as KnOTSTies
    from safemerge_pl.methods import MergeMethod as MergeMethod
    from safemerge_pl.methods import NaiveAccumulation as NaiveAccumulation
    from safemerge_pl.methods import SafeMerge as SafeMerge
    from safemerge_pl.methods import TaskArithmetic as TaskArithmetic
    from safemerge_pl.methods import TiesMerging as TiesMerging
    from safemerge_pl.methods import WUDIMerging as WUDIMerging
    from safemerge_pl.module import ContinualMergeModule as ContinualMergeModule

_METHODS = (
    "IsoC",
    "KnOTSTies",
    "MergeMethod",
    "NUFILT",
    "NaiveAccumulation",
    "OPCM",
    "SafeMerge",
    "TSVM",
    "TaskArithmetic",
    "TiesMerging",
    "WUDIMerging",
)
_HOMES = {
    "ContinualMergeModule": "safemerge_pl.module",
    "ContinualMerger": "safemerge_pl.merger",
    "FoldReport": "safemerge_pl.merger",
    "LiveMerger": "safemerge_pl.live",
    **dict.fromkeys(_METHODS, "safemerge_pl.methods"),
}
_MODULES = ("callbacks", "functional", "metrics")
_EARLIER = {
    "benchmark_data": "safemerge_pl.data",
    "glue": "safemerge_pl.data",
    "open_clip_backbone": "safemerge_pl.backbones",
    "t5_backbone": "safemerge_pl.backbones",
}
"""Modules of version 0.1.0 that configurations and checkpoints name in class paths, and where the classes are now."""

__all__ = [
    "NUFILT",
    "OPCM",
    "TSVM",
    "ContinualMergeModule",
    "ContinualMerger",
    "FoldReport",
    "IsoC",
    "KnOTSTies",
    "LiveMerger",
    "MergeMethod",
    "NaiveAccumulation",
    "SafeMerge",
    "TaskArithmetic",
    "TiesMerging",
    "WUDIMerging",
    "__version__",
    "callbacks",
    "functional",
    "metrics",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"safemerge_pl.{name}")
    if name in _EARLIER:
        return importlib.import_module(_EARLIER[name])
    raise AttributeError(f"module 'safemerge_pl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
