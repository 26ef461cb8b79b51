"""One number per set, whoever asks for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from small import SmallZoo
from tiny_text import glue, save_t5, t5, write_glue

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.backbones.t5 import T5Backbone
from safemerge_pl.data.texts import ExactMatchScore
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.scoring import Scorer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random T5 with its own head, as a folder."""
    return save_t5(t5(), tmp_path_factory.mktemp("t5") / "base")


def test_scorer_outside_a_trainer_equals_validation(base: Path, tmp_path: Path, make_trainer: Any) -> None:
    """One number per set, whoever asks; the loader's order and the batches do not matter."""
    write_glue(tmp_path, 12, ["cola", "stsb", "rte"])
    backbone = T5Backbone(str(base))
    backbone.load()
    outside = Scorer(backbone, glue(tmp_path, ["cola", "stsb"], ["rte"], batch_size=5))
    done: list[int] = []
    outside.progress = done.append
    scores = {name: outside.score(name) for name in ("cola", "stsb", "rte")}
    assert done == [1] * 9  # 12 rows in batches of 5
    assert [outside.data.count_batches(name) for name in scores] == [3, 3, 3]
    module = ContinualMergeModule(T5Backbone(str(base)))
    trainer: L.Trainer = make_trainer()
    trainer.validate(module, glue(tmp_path, ["cola", "stsb"], ["rte"], batch_size=4), verbose=False)
    assert {name: module.last_scores[name] for name in scores} == scores
    assert all(value == value for value in module.last_scores.values())
    inputs, answers, _ = outside.data.labelled_set("cola").batches(backbone).__getitems__([0, 1])  # type: ignore[attr-defined]
    assert module(inputs, "cola") == backbone.generate(outside.data.labelled_set("cola").prompts([0, 1])[0])  # type: ignore[attr-defined]
    assert isinstance(outside.add("cola"), ExactMatchScore)
    assert not isinstance(CLIPBackbone(), T5Backbone)
    assert len(answers) == 2


def test_accuracy_of_each_set_counts_only_its_own_images(
    make_trainer: Callable[..., Any], small_data: Callable[..., SmallZoo]
) -> None:
    """Micro accuracy per set, equal to counting by hand; nothing leaks between sets or runs."""
    module = ContinualMergeModule()
    trainer = make_trainer()
    for _ in range(2):
        trainer.validate(module, small_data(), verbose=False)
        for name in ("font_category", "weather", "mnist", "clipart_category"):
            rows = small_data().labelled_set(name).rows[:]
            with torch.inference_mode():
                logits = module(module.backbone.preprocess(rows["image"]), name)
            right = (logits.argmax(1) == torch.tensor(rows["label"])).double().mean()
            assert module.last_scores[name] == right.item()
