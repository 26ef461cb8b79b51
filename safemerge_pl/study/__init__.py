"""Studies: orders x methods x settings over whole streams, every cell measured once and kept."""

from safemerge_pl.reports.study import StudyFigure
from safemerge_pl.study.cells import Cell, StudyRow
from safemerge_pl.study.executors import DaskExecutor, LocalProcesses
from safemerge_pl.study.study import Study

__all__ = ["Cell", "DaskExecutor", "LocalProcesses", "Study", "StudyFigure", "StudyRow"]
