"""Names that wrappers, libraries and training scripts change are matched, and nothing else is."""

import re
from pathlib import Path

import pytest
import tiny
import torch
from tiny import Tensors
from torch import nn

from safemerge_pl.checkpoints import CheckpointError, match_names, open_checkpoint


def bare() -> tuple[list[str], Tensors]:
    tensors = tiny.tower()
    return tiny.only_weights(tensors), tensors


WRAPPERS = {
    "plain": lambda name: name,
    "DDP": lambda name: f"module.{name}",
    "compile": lambda name: f"_orig_mod.{name}",
    "compiled submodule": lambda name: name.replace("encoder.", "encoder._orig_mod."),
    "compiled layer": lambda name: re.sub(r"layers\.(\d+)\.", r"layers.\1._orig_mod.", name),
    "legacy": lambda name: f"vision_model.{name}",
    "stacked": lambda name: f"model.module._orig_mod.vision_model.{name}",
    "stacked otherwise": lambda name: f"_orig_mod.module.model._orig_mod.{name}",
    "Lightning": lambda name: f"model.{name}",
    "task vectors": lambda name: f"image_encoder.model.visual.{name}",
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("own", ["plain", "legacy", "DDP"])
def test_wrappers_around_either_side_do_not_matter(wrapper: str, own: str) -> None:
    wanted, tensors = bare()
    incoming = open_checkpoint({WRAPPERS[wrapper](name): tensor for name, tensor in tensors.items()})
    found = match_names([WRAPPERS[own](name) for name in wanted], incoming)
    assert found == {WRAPPERS[own](name): WRAPPERS[wrapper](name) for name in wanted}


def test_the_tower_is_found_inside_a_two_tower_model() -> None:
    """The text tower has the same names below its prefix."""
    incoming = open_checkpoint(tiny.hf_clip())
    wanted, _ = bare()
    assert set(match_names(wanted, incoming).values()) == {f"vision_model.{name}" for name in wanted}


def test_an_image_encoder_of_the_task_vector_scripts_is_found() -> None:
    """With a real open_clip model below its chain of attributes, text tower present."""
    model = tiny.open_clip_model()
    wrapper = nn.Module()
    wrapper.model = model
    tensors = {f"image_encoder.{name}": tensor for name, tensor in wrapper.state_dict().items()}
    wanted = [name for name in model.state_dict() if name.startswith("visual.") and "resblocks" in name]
    found = match_names(wanted, open_checkpoint(tensors))
    assert found == {name: f"image_encoder.model.{name}" for name in wanted}


def test_a_real_compiled_and_wrapped_module_is_found(tmp_path: Path) -> None:
    """Names as torch itself writes them."""
    compiled = torch.compile(tiny.hf_vision())
    wrapper = nn.Module()
    wrapper.module = compiled
    torch.save(wrapper.state_dict(), tmp_path / "model.pt")
    wanted, _ = bare()
    found = match_names(wanted, open_checkpoint(tmp_path / "model.pt"))
    assert found == {name: f"module._orig_mod.{name}" for name in wanted}


def test_a_name_that_comes_with_and_without_wrapper_is_refused() -> None:
    wanted, tensors = bare()
    twice = tensors | {f"module.{wanted[0]}": tensors[wanted[0]] + 1}
    with pytest.raises(CheckpointError) as caught:
        match_names(wanted, open_checkpoint(twice))
    assert f"`{wanted[0]}`" in str(caught.value)
    assert f"`module.{wanted[0]}`" in str(caught.value)


def test_a_file_that_holds_the_model_twice_is_refused() -> None:
    """Student and teacher, or raw and averaged weights, side by side."""
    wanted, tensors = bare()
    twice = tiny.renamed(tensors, "", "student.") | tiny.renamed(tensors, "", "teacher.")
    with pytest.raises(CheckpointError, match=r"twice.*student\..*teacher\."):
        match_names(wanted, open_checkpoint(twice))


def test_equal_names_are_matched_even_if_only_one_layer_is_wanted() -> None:
    """Another layer of the same shape is no second copy of the model."""
    _, tensors = bare()
    name = "encoder.layers.0.self_attn.q_proj.weight"
    assert match_names([name], open_checkpoint(tensors)) == {name: name}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_layers_of_one_block_are_matched_with_that_block(wrapper: str) -> None:
    wanted, tensors = bare()
    first = [name for name in wanted if ".0." in name]
    incoming = open_checkpoint({WRAPPERS[wrapper](name): tensor for name, tensor in tensors.items()})
    assert match_names(first, incoming) == {name: WRAPPERS[wrapper](name) for name in first}


def test_the_encoder_of_t5_is_not_taken_for_its_decoder() -> None:
    tensors = tiny.hf_t5().state_dict()
    wanted = [name for name in tensors if re.match(r"encoder\.block\.0.*SelfAttention\.[qkvo]", name)]
    assert match_names(wanted, open_checkpoint(tensors)) == {name: name for name in wanted}


def test_a_block_is_not_taken_for_another() -> None:
    """One block is wanted, and the file holds only the other."""
    wanted, tensors = bare()
    incoming = open_checkpoint({name: tensor for name, tensor in tensors.items() if ".1." in name})
    with pytest.raises(CheckpointError, match="lacks 5 of 5"):
        match_names([name for name in wanted if ".0." in name], incoming)


def test_a_decoder_is_not_taken_for_an_encoder() -> None:
    tensors = tiny.hf_t5().state_dict()
    wanted = [name for name in tensors if re.match(r"encoder\.block\.0.*SelfAttention\.[qkvo]", name)]
    incoming = open_checkpoint({name: tensor for name, tensor in tensors.items() if name.startswith("decoder.")})
    with pytest.raises(CheckpointError, match="lacks 4 of 4"):
        match_names(wanted, incoming)


def test_a_partial_match_is_refused_with_the_first_missing_tensor() -> None:
    wanted, tensors = bare()
    partial = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    first = next(name for name in wanted if "layers.1." in name)
    with pytest.raises(CheckpointError, match=rf"lacks 5 of 10 tensors to merge, first `{re.escape(first)}`"):
        match_names(wanted, open_checkpoint(partial))


def test_another_model_is_refused_with_an_example_of_its_names() -> None:
    """No match at all is an error, always."""
    wanted, _ = bare()
    with pytest.raises(CheckpointError, match=r"lacks 10 of 10 .*it has, for example, `backbone\.stem\.weight`"):
        match_names(wanted, open_checkpoint({"backbone.stem.weight": torch.zeros(2, 2)}))


def test_prefixes_are_not_mixed_within_one_match() -> None:
    """Half of the layers under one prefix and half under another is no model."""
    wanted, tensors = bare()
    mixed = {("left." if "layers.0." in name else "right.") + name: tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match="lacks 5 of 10"):
        match_names(wanted, open_checkpoint(mixed))
