"""Scores kept on disk under everything they depend on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_hub import data_of

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.scoring import Scorer

pytestmark = pytest.mark.usefixtures("datasets_apart")


def test_scores_are_kept(benchmark: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation that was interrupted goes on; other weights, prompts, images or fewer of them are other scores."""
    monkeypatch.setenv("SAFEMERGE_CACHE", str(tmp_path / "kept"))
    backbone = CLIPBackbone(str(benchmark[0]))
    backbone.load()
    scored: list[str] = []
    told: list[int] = []
    real = Scorer.count

    def counting(self: Scorer, name: str, batch: Any) -> None:
        scored.append(name)
        real(self, name, batch)

    monkeypatch.setattr(Scorer, "count", counting)

    def score(name: str = "eurosat", **settings: Any) -> float:
        scored.clear()
        told.clear()
        scorer = Scorer(backbone, data_of(benchmark, **settings))
        scorer.progress = told.append
        return scorer.score(name)

    first = score()
    assert len(scored) == 3
    assert told == [1, 1, 1]
    assert score() == first
    assert scored == []
    assert told == [3]
    (file,) = (tmp_path / "kept" / "scores").iterdir()
    file.write_text("{")
    assert score() == first
    assert len(scored) == 3
    for settings in ({"limit": 5}, {"prompts": {"eurosat": "single"}}):
        score(**settings)
        assert scored
    with torch.no_grad():
        backbone.vision_model.encoder.layers[0].mlp.fc1.weight.mul_(3)
    score()
    assert scored
    assert len(list(file.parent.iterdir())) == 4
