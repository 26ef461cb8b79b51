"""Image sets: counted to the image, decoded in any number of processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tiny_hub import data_of, write_set

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.module import ContinualMergeModule

pytestmark = pytest.mark.usefixtures("datasets_apart")


def module_of(benchmark: tuple[Path, Path]) -> ContinualMergeModule:
    return ContinualMergeModule(CLIPBackbone(str(benchmark[0]), image_backend="pil"))


def test_scores_equal_counting_by_hand(benchmark: tuple[Path, Path], make_trainer: Callable[..., Any]) -> None:
    """Boolean labels, a web data set and parquet files, in batches that do not divide the sets."""
    module, trainer = module_of(benchmark), make_trainer()
    trainer.validate(module, data_of(benchmark, tasks=["pcam", "eurosat"]), verbose=False)
    for name in ("pcam", "eurosat", "fer2013"):
        rows = data_of(benchmark, tasks=["pcam", "eurosat"]).labelled_set(name).rows[:]
        with torch.inference_mode():
            logits = module(module.backbone.preprocess(rows["image"]), name)
        right = sum(int(a == int(b)) for a, b in zip(logits.argmax(1).tolist(), rows["label"], strict=True))
        assert module.last_scores[name] == right / 12


def test_workers_decode_the_same(benchmark: tuple[Path, Path], make_trainer: Callable[..., Any]) -> None:
    scores = []
    for workers in (0, 2):
        module = module_of(benchmark)
        make_trainer().validate(module, data_of(benchmark, num_workers=workers), verbose=False)
        scores.append(module.last_scores)
    assert scores[0] == scores[1]


def test_an_image_that_cannot_be_decoded_is_named(benchmark: tuple[Path, Path], tmp_path: Path) -> None:
    write_set(tmp_path / "mnist", "mnist", 4)
    path = tmp_path / "mnist" / "data" / "test-00000-of-00001.parquet"
    rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "c")).cast_column(
        "image", datasets.Image(decode=False)
    )
    broken = [{"bytes": b"no image", "path": None}, *rows["image"][1:]]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict({"image": broken, "label": [0, 1, 2, 3]}, features=features).to_parquet(path)
    data = data_of(benchmark, tasks=["mnist"], controls=[], folder=str(tmp_path))
    backbone = CLIPBackbone(str(benchmark[0]))
    dataset: Any = data.dataset("mnist", backbone)
    dataset.__getitems__([1, 3])
    with pytest.raises(ValueError, match=r"set 'mnist': one of the images 0 to 2 cannot be decoded .*; fetch the set"):
        dataset.__getitems__([0, 2])
