"""Data-free continual model merging on PyTorch Lightning.

Names are imported when they are first used, so that ``import safemerge_pl`` and ``safemerge --help`` cost nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safemerge_pl import callbacks as callbacks
    from safemerge_pl import functional as functional
    from safemerge_pl import metrics as metrics
    from safemerge_pl.merger import ContinualMerger as ContinualMerger
    from safemerge_pl.merger import FoldReport as FoldReport
    from safemerge_pl.methods import MergeMethod as MergeMethod
    from safemerge_pl.methods import SafeMerge as SafeMerge
    from safemerge_pl.module import ContinualMergeModule as ContinualMergeModule

__version__ = "0.1.0"

_HOMES = {
    "ContinualMergeModule": "safemerge_pl.module",
    "ContinualMerger": "safemerge_pl.merger",
    "FoldReport": "safemerge_pl.merger",
    "MergeMethod": "safemerge_pl.methods",
    "SafeMerge": "safemerge_pl.methods",
}
_MODULES = ("callbacks", "functional", "metrics")

__all__ = [
    "ContinualMergeModule",
    "ContinualMerger",
    "FoldReport",
    "MergeMethod",
    "SafeMerge",
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
    raise AttributeError(f"module 'safemerge_pl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
