"""The drift of a merge of files: the model beside them is run."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import SafeShare, TaskArithmetic
from safemerge_pl.scoring import DriftGauge, FileGauge
from safemerge_pl.zoo import FILES

MODEL, EXPERT = FILES / "model", FILES / "experts" / "mnist"


@pytest.mark.parametrize("method", [SafeShare(0.5, 21, 32), TaskArithmetic()], ids=["matrices", "all parameters"])
def test_the_same_as_in_the_tower(method: SafeShare | TaskArithmetic) -> None:
    """Whatever the names: of the file here, of the tower in a stream."""
    backbone = CLIPBackbone()
    backbone.load()
    stream = DriftGauge(backbone, backbone.noise(256), tower=backbone.vision_model)
    merger = ContinualMerger(MODEL, method)
    merger.fold(EXPERT, "mnist")
    gauge = FileGauge(str(MODEL))
    gauge.require_sight(merger.plan)
    found = merger.merged_parameters()
    prefix = "vision_model."
    drift = gauge(found)
    assert drift == stream.measure({name.removeprefix(prefix): tensor for name, tensor in found.items()}) > 1e-4
    assert gauge({}) == 0


def test_parameters_that_the_features_do_not_show_are_refused() -> None:
    text = ContinualMerger(MODEL, TaskArithmetic(), layers=["vision_model*fc1.weight", "text_model*fc1.weight"])
    with pytest.raises(
        CheckpointError, match=r"not see 3 of the merged parameters, first `text_model\.encoder\.layers\.0"
    ):
        FileGauge(str(MODEL)).require_sight(text.plan)


def test_models_that_cannot_be_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file by itself, which cannot be run"):
        FileGauge(str(MODEL / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"cannot be run here \(it is a clip_vision_model\)"):
        FileGauge(str(EXPERT))
    for content in ("{", "[]", json.dumps({"model_type": ["clip"]})):
        folder = tmp_path / str(len(content))
        folder.mkdir()
        shutil.copy(MODEL / "model.safetensors", folder)
        (folder / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"cannot be run here \(it has no configuration\)"):
            FileGauge(str(folder))


def test_the_pretrained_weights_return() -> None:
    """A measurement that fails half way leaves nothing behind."""
    gauge = FileGauge(str(MODEL))
    with pytest.raises(RuntimeError, match="size of tensor"):
        gauge({"vision_model.post_layernorm.weight": torch.zeros(3)})
    assert gauge({}) == 0
