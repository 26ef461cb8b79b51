"""The zoo through the real libraries: exact counts, exact sharing, heads."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import SmallZoo
from torch.nn.functional import normalize

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.backbones.heads import zero_shot_head
from safemerge_pl.checkpoints import CheckpointError, match_names, open_checkpoint
from safemerge_pl.data import ZooData
from safemerge_pl.data.module import ExactShard
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.zoo import Zoo

# zoo/files/README.md: (images, right answers of the pretrained model, right answers of the expert)
COUNTS = {
    "mnist": (1000, 194, 974),
    "fashion": (1000, 242, 843),
    "letters": (1040, 304, 947),
    "flags": (1050, 683, 939),
    "animal_silhouettes": (976, 208, 897),
    "weather": (984, 380, 678),
    "clipart_category": (706, 75, 205),
    "font_category": (800, 150, 436),
    "probe1_seen_styles": (1200, 632, None),
    "probe2_unseen_vendors": (996, 427, None),
    "probe3_clipart_photos": (798, 137, None),
}


@torch.inference_mode()
def right_answers(backbone: CLIPBackbone, name: str) -> tuple[int, int]:
    images = ZooData().labelled_set(name)
    head = zero_shot_head(backbone, images.classes, images.templates)
    right = 0
    for start in range(0, len(images), 32):
        rows = images.rows[start : start + 32]
        features = normalize(backbone(backbone.preprocess(rows["image"])), dim=-1)
        right += int(((features @ head.T).argmax(1) == torch.tensor(rows["label"])).sum())
    return len(images), right


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_exact_counts(name: str) -> None:
    """The evaluator agrees with the zoo's documented counts to the image (one image of slack for other BLAS)."""
    backbone = CLIPBackbone()
    backbone.load()
    size, pretrained, expert = COUNTS[name]
    found_size, found = right_answers(backbone, name)
    assert found_size == size
    assert abs(found - pretrained) <= 1
    if expert is not None:
        checkpoint = open_checkpoint(Zoo().expert(name))
        tower = backbone.vision_model
        names = match_names([key for key, value in tower.state_dict().items() if value.ndim], checkpoint)
        tower.load_state_dict({mine: checkpoint[theirs] for mine, theirs in names.items()}, strict=False)
        assert abs(right_answers(backbone, name)[1] - expert) <= 1


@pytest.mark.parametrize(("length", "world"), [(5, 2), (1, 2), (7, 3), (6, 3), (0, 2)])
def test_shards_hold_each_sample_once(length: int, world: int) -> None:
    """J3: no padding."""
    shards = [list(ExactShard(length, rank, world)) for rank in range(world)]
    assert sorted(index for shard in shards for index in shard) == list(range(length))
    assert [len(ExactShard(length, rank, world)) for rank in range(world)] == [len(shard) for shard in shards]


def test_head_is_normalised_twice_and_ignores_feature_scale() -> None:
    """K8: mean of unit vectors, then unit again; hand-made text features."""

    class Toy(CLIPBackbone):
        scale = 1.0

        def encode_text(self, texts: Any) -> torch.Tensor:
            table = {"a x": [3.0, 4.0], "b x": [0.0, 2.0], "a y": [-1.0, 0.0], "b y": [-5.0, 0.0]}
            return self.scale * torch.tensor([table[text] for text in texts])

    head = zero_shot_head(Toy(), ["x", "y"], ["a {}", "b {}"], batch_size=3)
    # x: ((0.6, 0.8) + (0, 1)) / 2 = (0.3, 0.9), length sqrt(0.9)
    expected = torch.tensor([[0.3, 0.9], [-1.0, 0.0]]) / torch.tensor([[0.9**0.5], [1.0]])
    torch.testing.assert_close(head, expected)
    Toy.scale = 10.0
    torch.testing.assert_close(zero_shot_head(Toy(), ["x", "y"], ["a {}", "b {}"]), expected)


@pytest.mark.parametrize(
    ("classes", "templates", "message"),
    [([], ["{}"], "needs classes"), (["a"], [], "needs classes"), (["a"], ["a photo"], r"has no \{\}")],
)
def test_head_input(classes: list[str], templates: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zero_shot_head(CLIPBackbone(), classes, templates)


def test_class_names_with_braces_are_plain_text() -> None:
    class Toy(CLIPBackbone):
        def encode_text(self, texts: Any) -> torch.Tensor:
            assert texts == ["a {curly} one"]
            return torch.ones(1, 2)

    zero_shot_head(Toy(), ["{curly}"], ["a {} one"])


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


def test_two_sets_of_one_name_and_small_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="`controls` must be distinct and no tasks"):
        ZooData(tasks=["mnist"], controls=["mnist"])
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        ZooData(batch_size=0)
    with pytest.raises(ValueError, match=r"streams of 8 tasks, not 14"):
        ZooData(tasks=14)


def test_accuracy_of_each_set_counts_only_its_own_images(
    make_trainer: Callable[..., Any], small_data: Callable[..., SmallZoo]
) -> None:
    """K5, K7, K10: micro accuracy per set, equal to counting by hand; nothing leaks between sets or runs."""
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
