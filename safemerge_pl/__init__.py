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
    from safemerge_pl.methods import *  # noqa: F403
    from safemerge_pl.module import ContinualMergeModule as ContinualMergeModule

_HOMES = {
    "ContinualMergeModule": "safemerge_pl.module",
    "ContinualMerger": "safemerge_pl.merger",
    "FoldReport": "safemerge_pl.merger",
    "LiveMerger": "safemerge_pl.live",
}
_MODULES = ("callbacks", "functional", "metrics")
_EARLIER = {
    "benchmark_data": "safemerge_pl.data",
    "glue": "safemerge_pl.data",
    "open_clip_backbone": "safemerge_pl.backbones",
    "t5_backbone": "safemerge_pl.backbones",
}
"""Modules of version 0.1.0 that configurations and checkpoints name in class paths, and where the classes are now."""


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted([*_HOMES, *_MODULES, "__version__", *_methods().__all__])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"safemerge_pl.{name}")
    if name in _EARLIER:
        return importlib.import_module(_EARLIER[name])
    # every other class is a merge method's; a module that is asked for in lower case must not wait for torch
    if name[:1].isupper() and name in _methods().__all__:
        return getattr(_methods(), name)
    raise AttributeError(f"module 'safemerge_pl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))


def _methods() -> Any:
    """Import the package that says which merge methods there are."""
    return importlib.import_module("safemerge_pl.methods")
