"""Merge methods, one file each; name them by class path in a configuration.

A line here is all that a new file needs: ``safemerge_pl`` and short names in YAML take every class of this list.
"""

from typing import TYPE_CHECKING

from safemerge_pl.methods.base import MergeMethod as MergeMethod
from safemerge_pl.methods.base import Stack as Stack
from safemerge_pl.methods.base import StackResult as StackResult
from safemerge_pl.methods.iso_c import IsoC as IsoC
from safemerge_pl.methods.knots_ties import KnOTSTies as KnOTSTies
from safemerge_pl.methods.nufilt import NUFILT as NUFILT
from safemerge_pl.methods.opcm import OPCM as OPCM
from safemerge_pl.methods.safe_merge import SafeMerge as SafeMerge
from safemerge_pl.methods.safe_share import SafeShare as SafeShare
from safemerge_pl.methods.task_arithmetic import NaiveAccumulation as NaiveAccumulation
from safemerge_pl.methods.task_arithmetic import TaskArithmetic as TaskArithmetic
from safemerge_pl.methods.ties import TiesMerging as TiesMerging
from safemerge_pl.methods.tsv_m import TSVM as TSVM
from safemerge_pl.methods.wudi import WUDIMerging as WUDIMerging

if not TYPE_CHECKING:  # a checker knows the names above, and would take everything for Any behind a list that is made
    __all__ = sorted(name for name, value in globals().items() if isinstance(value, type))
