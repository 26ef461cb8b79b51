"""The zoo through the real libraries: right answers to the image."""

import pytest
import torch
from torch.nn.functional import normalize

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.backbones.heads import zero_shot_head
from safemerge_pl.checkpoints import match_names, open_checkpoint
from safemerge_pl.data import ZooData
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
