"""CLIP of transformers: folders that are refused, preprocessing, prompts that are too long."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.zoo import Zoo

pytestmark = pytest.mark.usefixtures("datasets_apart")


def test_clip_folder_errors(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere-to-be-found does not exist"):
        CLIPBackbone("nowhere-to-be-found").load()
    (tmp_path / "model.safetensors").write_bytes((Zoo().model / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        CLIPBackbone(str(tmp_path)).load()
    config = json.loads((Zoo().model / "config.json").read_text())
    config["vision_config"]["hidden_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no CLIP model that transformers can load"):
        CLIPBackbone(str(tmp_path)).load()


def test_preprocessing_as_the_paper_s_pipeline(benchmark: tuple[Path, Path], tmp_path: Path) -> None:
    """PIL's resizing and torchvision's differ by rounding; the one asked for is the one used, also elsewhere."""
    import pickle

    import numpy
    from tiny_hub import picture

    images = [picture(index, 40) for index in range(3)]
    pil = CLIPBackbone(str(benchmark[0]), image_backend="pil").preprocess(images)
    other = CLIPBackbone(str(benchmark[0]))
    assert pil.shape == other.preprocess(images).shape == (3, 3, 16, 16)
    resized = numpy.asarray(images[0].resize((16, 16), 3))
    expected = torch.tensor(resized).permute(2, 0, 1) / 255
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    torch.testing.assert_close(pil[0], (expected - mean) / std, atol=1e-5, rtol=0)
    sent = pickle.dumps(other.preprocessor())
    assert len(sent) < 10_000
    assert torch.equal(pickle.loads(sent)(images), other.preprocess(images))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        CLIPBackbone(str(tmp_path)).preprocess(images)


def test_a_text_that_is_too_long_for_the_tower(benchmark: tuple[Path, Path]) -> None:
    backbone = CLIPBackbone(str(benchmark[0]))
    backbone.load()
    with pytest.raises(ValueError, match="the text tower takes 320 tokens, which 'zzz"):
        backbone.encode_text(["z" * 2000, "short"])
