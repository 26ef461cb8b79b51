"""Zero-shot heads: unit vectors of class names, kept on disk where they take long."""

from pathlib import Path
from typing import Any

import pytest
import torch

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.backbones.heads import zero_shot_head
from safemerge_pl.data.image_sets import find_spec

pytestmark = pytest.mark.usefixtures("datasets_apart")


def test_head_is_normalised_twice_and_ignores_feature_scale() -> None:
    """Mean of unit vectors, then unit again; hand-made text features."""

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


def test_a_head_of_many_texts_is_kept(
    benchmark: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the same from the cache; another text tower, text or tokenizer is another head."""
    backbone = CLIPBackbone(str(benchmark[0]))
    backbone.load()
    key = backbone.text_key()
    backbone._text.pop("key")
    spec = find_spec("stanford-cars")
    plain = zero_shot_head(backbone, spec.classes, spec.templates)
    monkeypatch.setenv("SAFEMERGE_CACHE", str(tmp_path / "kept"))
    first = zero_shot_head(backbone, spec.classes, spec.templates)
    (file,) = (tmp_path / "kept" / "heads").iterdir()
    assert torch.equal(plain, first)
    assert backbone.text_key() == key  # what the tokenizer last did is not what it is
    with monkeypatch.context() as inner:
        inner.setattr(CLIPBackbone, "encode_text", None)
        assert torch.equal(zero_shot_head(backbone, spec.classes, spec.templates), first)
    file.write_bytes(b"damaged")
    assert torch.equal(zero_shot_head(backbone, spec.classes, spec.templates), first)
    zero_shot_head(backbone, spec.classes[::-1], spec.templates)
    other = CLIPBackbone(str(benchmark[0]))
    other.load()
    assert other.text_key() == backbone.text_key()
    other._text.pop("key")
    with torch.no_grad():
        other._text["projection"].weight[0, 0] += 1
    assert other.text_key() != backbone.text_key()
    zero_shot_head(other, spec.classes, spec.templates)
    assert len(list(file.parent.iterdir())) == 3


def test_a_cache_that_cannot_be_written_costs_only_time(
    benchmark: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAFEMERGE_CACHE", str(tmp_path / "file"))
    backbone = CLIPBackbone(str(benchmark[0]))
    backbone.load()
    assert zero_shot_head(backbone, [str(index) for index in range(1024)], ["{}"]).shape == (1024, 8)
