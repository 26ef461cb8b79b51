"""Tasks, their order and their test sets.

This is the list of the kinds of data: a class of its own file that is imported here can be named in a configuration by
its bare name, as ``class_path: ZooData``.
"""

from safemerge_pl.data.benchmark import CLIPBenchmarkData as CLIPBenchmarkData
from safemerge_pl.data.glue import GLUEData as GLUEData
from safemerge_pl.data.image_folders import ImageFolderData as ImageFolderData
from safemerge_pl.data.images import ImageSet as ImageSet
from safemerge_pl.data.labelled import LabelledSet as LabelledSet
from safemerge_pl.data.module import StreamDataModule as StreamDataModule
from safemerge_pl.data.module import as_it_is as as_it_is
from safemerge_pl.data.zoo import ZooData as ZooData

__all__ = [
    "CLIPBenchmarkData",
    "GLUEData",
    "ImageFolderData",
    "ImageSet",
    "LabelledSet",
    "StreamDataModule",
    "ZooData",
    "as_it_is",
]
