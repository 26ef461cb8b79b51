"""The text tower of a contrastive model: merged where the pretrained model or `layers` asks for it, and only there."""

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import Add, Tensors

from safemerge_pl.architectures.layers import counterparts
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, TaskArithmetic

TEXT, VISION = "text_model.", "vision_model."


def clip() -> Tensors:
    """A whole CLIP whose two towers have equal shapes, so that no shape can tell them apart."""
    vision = {
        f"{VISION}encoder.layers.{i}.{part}.weight": tiny.randn(*shape, seed=i)
        for i in range(2)
        for part, shape in (("self_attn.q_proj", (8, 8)), ("self_attn.k_proj", (8, 8)), ("mlp.fc1", (16, 8)))
    }
    text = {name.replace(VISION, TEXT): tensor.flip(0) for name, tensor in vision.items()}
    words = {f"{TEXT}embeddings.token_embedding.weight": tiny.randn(16, 8, seed=9)}
    return {"logit_scale": torch.tensor(1.0)} | text | words | vision


def side(tensors: Tensors, prefix: str, put: str | None = None) -> Tensors:
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return found if put is None else tiny.renamed(found, prefix, put)


def folded(base: Any, incoming: Any, method: Any = None, **options: Any) -> Tensors:
    merger = ContinualMerger(base, method or Add(), **options)
    merger.fold(incoming, "task")
    return merger.merged


@pytest.mark.parametrize("method", [Add, OPCM, TaskArithmetic])
@pytest.mark.parametrize("base", [TEXT, "", "text_encoder.text_model.", "module.text_model."])
@pytest.mark.parametrize("whole", ["", "model.", "module."])
def test_a_text_encoder_takes_the_text_tower_of_a_whole_clip(base: str, whole: str, method: Any) -> None:
    """Under any prefix, also the bare names that transformers 5 has in memory."""
    own, expert = side(clip(), TEXT, base), tiny.tuned(clip(), 1)
    expected = folded(own, side(expert, TEXT, base), method())
    tiny.assert_same(folded(own, tiny.renamed(expert, "", whole), method()), expected)


def test_a_text_encoder_file_takes_the_bare_names_of_memory() -> None:
    expert = side(tiny.tuned(clip(), 1), TEXT)
    expected = folded(side(clip(), TEXT), expert)
    tiny.assert_same(folded(side(clip(), TEXT), tiny.renamed(expert, TEXT, "")), expected)


def test_a_text_encoder_of_a_library_takes_what_that_library_saves(tmp_path: Path) -> None:
    from transformers import CLIPTextModel

    tiny.hf_clip().save_pretrained(tmp_path / "clip")
    base = CLIPTextModel.from_pretrained(tmp_path / "clip")
    base.save_pretrained(tmp_path / "base")
    expert: Any = tiny.hf_clip()
    expert.load_state_dict(tiny.tuned(expert.state_dict(), 1))
    expert.save_pretrained(tmp_path / "expert")
    for own in (base, tmp_path / "base"):
        hashes = set()
        for incoming in (expert, tmp_path / "expert", CLIPTextModel.from_pretrained(tmp_path / "expert")):
            merger = ContinualMerger(own, tiny.fast_method())
            merger.fold(incoming, "task")
            hashes.add(merger.fingerprint())
        assert len(hashes) == 1


def test_a_vision_tower_is_no_text_encoder() -> None:
    expert = side(tiny.tuned(clip(), 1), VISION)
    for base in (side(clip(), TEXT), side(clip(), TEXT, "")):
        with pytest.raises(CheckpointError, match="lacks"):
            folded(base, expert)


@pytest.mark.parametrize("method", [Add, OPCM])
def test_layers_choose_the_text_tower_of_two(method: Any) -> None:
    base, expert = clip(), tiny.tuned(clip(), 1)
    found = folded(base, expert, method(), layers=["text_model.*.q_proj.weight", "text_model.*.fc1.weight"])
    changed = {name for name in base if not torch.equal(found[name], base[name])}
    assert changed == {name for name in base if re.match(r"text_model.*(q_proj|fc1)\.weight", name)}


def test_layers_choose_both_towers_where_both_are_named() -> None:
    base, expert = clip(), tiny.tuned(clip(), 1)
    found = folded(base, tiny.renamed(expert, "", "model."), layers=["vision_model.*", "text_model.encoder.*"])
    for name in base:
        if ".layers." in name:
            torch.testing.assert_close(found[name], expert[name], rtol=0, atol=1e-6)


def test_a_pattern_that_fits_both_towers_means_the_vision_tower() -> None:
    base, expert = clip(), tiny.tuned(clip(), 1)
    found = folded(base, expert, layers=["*.q_proj.weight"])
    changed = {name for name in base if not torch.equal(found[name], base[name])}
    assert changed == {name for name in base if re.match(r"vision_model.*q_proj", name)}


@pytest.mark.parametrize("prefix", ["", "module."])
def test_layers_choose_open_clip_s_text_tower(prefix: str) -> None:
    """Its names are those of the vision tower without the `visual.`."""
    base: Tensors = dict(tiny.open_clip_model().state_dict())
    expert = tiny.tuned(base, 1)
    found = folded(base, tiny.renamed(expert, "", prefix), layers=["transformer.resblocks.*.in_proj_weight"])
    changed = {name for name in base if not torch.equal(found[name], base[name])}
    assert changed == {name for name in base if re.match(r"transformer.*in_proj_weight", name)}
    for name in changed:
        torch.testing.assert_close(found[name], expert[name], rtol=0, atol=1e-6)


def test_a_merge_of_a_text_tower_is_saved_and_continued(tmp_path: Path) -> None:
    model: Any = tiny.hf_clip()
    model.save_pretrained(tmp_path / "base")
    layers = ["text_model.*.q_proj.weight"]
    merger = ContinualMerger(tmp_path / "base", tiny.fast_method(), layers=layers)
    merger.fold(tiny.tuned(model.state_dict(), 1), "one")
    merger.save(tmp_path / "out")
    again = ContinualMerger.load(tmp_path / "out", tmp_path / "base", layers=layers)
    assert again.fingerprint() == merger.fingerprint()
    tiny.assert_same(ContinualMerger(tmp_path / "out", Add(), layers=layers).merged, merger.merged)


def test_what_is_searched_is_the_tower_that_is_wanted() -> None:
    names = ["visual.a.weight", "transformer.a.weight", "token_embedding.weight"]
    assert counterparts(names, ["visual.a.weight"]) == ["visual.a.weight"]
    assert counterparts(names, ["transformer.a.weight"], names) == names[1:]
    assert counterparts(names, names) == names
    assert counterparts(names, ["a.weight"]) == ["visual.a.weight"]
    assert counterparts(names, ["a.weight"], ["a.weight", "token_embedding.weight"]) == names[1:]
