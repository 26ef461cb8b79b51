"""Tasks, their order and their test sets."""

from safemerge_pl.data.benchmark import CLIPBenchmarkData as CLIPBenchmarkData
from safemerge_pl.data.glue import GLUEData as GLUEData
from safemerge_pl.data.module import ImageSet as ImageSet
from safemerge_pl.data.module import LabelledSet as LabelledSet
from safemerge_pl.data.module import StreamDataModule as StreamDataModule
from safemerge_pl.data.module import ZooData as ZooData
from safemerge_pl.data.module import as_it_is as as_it_is

__all__ = [
    "CLIPBenchmarkData",
    "GLUEData",
    "ImageSet",
    "LabelledSet",
    "StreamDataModule",
    "ZooData",
    "as_it_is",
]
