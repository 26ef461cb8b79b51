"""Models that can be scored.

This is the list of the kinds of backbones: a class of its own file that is imported here can be named in a
configuration by its bare name, as ``class_path: CLIPBackbone``, and by this package's path in saved files.
"""

from safemerge_pl.backbones.base import Backbone as Backbone
from safemerge_pl.backbones.base import backbone_spec as backbone_spec
from safemerge_pl.backbones.base import build_backbone as build_backbone
from safemerge_pl.backbones.clip import CLIPBackbone as CLIPBackbone
from safemerge_pl.backbones.heads import zero_shot_head as zero_shot_head
from safemerge_pl.backbones.noise import noise_images as noise_images
from safemerge_pl.backbones.noise import noise_tokens as noise_tokens
from safemerge_pl.backbones.open_clip import OpenCLIPBackbone as OpenCLIPBackbone
from safemerge_pl.backbones.t5 import T5Backbone as T5Backbone

__all__ = [
    "Backbone",
    "CLIPBackbone",
    "OpenCLIPBackbone",
    "T5Backbone",
    "backbone_spec",
    "build_backbone",
    "noise_images",
    "noise_tokens",
    "zero_shot_head",
]
