"""Descriptions of backbones: written under public paths, read under those of every version."""

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningArgumentParser

import safemerge_pl.backbones
from safemerge_pl.backbones import Backbone, CLIPBackbone, OpenCLIPBackbone, T5Backbone, backbone_spec, build_backbone
from safemerge_pl.backbones.base import cache_key
from safemerge_pl.module import ContinualMergeModule

KINDS = [CLIPBackbone, OpenCLIPBackbone, T5Backbone]
EARLIER = {
    "safemerge_pl.open_clip_backbone.OpenCLIPBackbone": OpenCLIPBackbone,
    "safemerge_pl.t5_backbone.T5Backbone": T5Backbone,
    "safemerge_pl.backbones.CLIPBackbone": CLIPBackbone,
    "safemerge_pl.backbones.base.CLIPBackbone": CLIPBackbone,
    "safemerge_pl.backbones.t5.T5Backbone": T5Backbone,
}


def described(path: str) -> dict[str, Any]:
    return {"class_path": path, "init_args": {"pretrained": "owner/name"}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_description_names_the_public_path(kind: type[Backbone]) -> None:
    spec = kind().spec()
    assert spec["class_path"] == f"safemerge_pl.backbones.{kind.__name__}"
    assert type(build_backbone(spec)) is kind
    assert build_backbone(json.loads(json.dumps(spec))).spec() == spec


@pytest.mark.parametrize("path", EARLIER)
def test_a_description_of_an_earlier_version_is_read(path: str) -> None:
    built = build_backbone(described(path))
    assert type(built) is EARLIER[path]
    assert built.pretrained == "owner/name"
    assert ContinualMergeModule(described(path)).backbone.spec() == built.spec()


@pytest.mark.parametrize("path", [path for path in EARLIER if ".base." not in path])  # that one was never released
def test_the_command_line_reads_the_description_in_an_earlier_checkpoint(path: str) -> None:
    """LightningCLI parses a checkpoint's settings over those of the configuration."""
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(ContinualMergeModule, "model")
    config = parser.parse_object({"model": {"backbone": {"class_path": "CLIPBackbone"}}})
    config = parser.parse_object({"model": {"backbone": described(path)}}, config)
    assert config.model.backbone.init_args.pretrained == "owner/name"
    assert config.model.backbone.class_path.rpartition(".")[2] == EARLIER[path].__name__


def test_results_are_kept_under_the_path_that_a_class_had_at_first() -> None:
    """Else every study and every kept score of version 0.1.0 would be measured again."""
    found = [cache_key(kind())["class_path"] for kind in KINDS]
    assert found == [
        "safemerge_pl.backbones.CLIPBackbone",
        "safemerge_pl.open_clip_backbone.OpenCLIPBackbone",
        "safemerge_pl.t5_backbone.T5Backbone",
    ]
    assert cache_key(T5Backbone("a"))["init_args"] == T5Backbone("a").spec()["init_args"]


def test_a_class_of_the_user_s_keeps_its_own_path() -> None:
    class Mine(CLIPBackbone):
        def spec(self) -> dict[str, Any]:
            return backbone_spec(self, pretrained="zoo")

    assert Mine().spec()["class_path"] == cache_key(Mine())["class_path"]
    assert Mine().spec()["class_path"].startswith(f"{__name__}.")


def test_the_package_lists_every_kind() -> None:
    """A bare name in a configuration and the path in saved files work for what the package imports."""
    for file in pkgutil.iter_modules(safemerge_pl.backbones.__path__):
        module = importlib.import_module(f"safemerge_pl.backbones.{file.name}")
        kinds = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Backbone)]
        assert all(getattr(safemerge_pl.backbones, kind.__name__) is kind for kind in kinds), file.name


def test_a_backbone_is_taken_as_given(tmp_path: Path) -> None:
    backbone = CLIPBackbone(str(tmp_path))
    assert build_backbone(backbone) is backbone
