"""Merge methods, one file each; name them by class path in a configuration."""

from safemerge_pl.methods.base import MergeMethod as MergeMethod
from safemerge_pl.methods.base import Stack as Stack
from safemerge_pl.methods.base import StackResult as StackResult
from safemerge_pl.methods.safe_merge import SafeMerge as SafeMerge

__all__ = ["MergeMethod", "SafeMerge", "Stack", "StackResult"]
