"""One model in the layouts of transformers, open_clip and timm: the same merge, to the last bit."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import tiny
import torch
from tiny import Add, Tensors
from tiny_adapters import trained, unloaded

from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.checkpoints.fit import align
from safemerge_pl.checkpoints.layouts import convert_layout, layer_index
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, IsoC, KnOTSTies, TaskArithmetic
from safemerge_pl.scoring import expert_weights


def as_open_clip(tensors: Tensors) -> Tensors:
    """A vision tower of transformers in open_clip's layout, spelled out."""
    found = {
        "visual.class_embedding": tensors["embeddings.class_embedding"],
        "visual.positional_embedding": tensors["embeddings.position_embedding.weight"],
        "visual.conv1.weight": tensors["embeddings.patch_embedding.weight"],
    }
    for end in ("weight", "bias"):
        found[f"visual.ln_pre.{end}"] = tensors[f"pre_layrnorm.{end}"]
        found[f"visual.ln_post.{end}"] = tensors[f"post_layernorm.{end}"]
        for i in range(2):
            old, new = f"encoder.layers.{i}", f"visual.transformer.resblocks.{i}"
            parts = [tensors[f"{old}.self_attn.{part}_proj.{end}"] for part in "qkv"]
            found[f"{new}.attn.in_proj_{end}"] = torch.cat(parts)
            found[f"{new}.attn.out_proj.{end}"] = tensors[f"{old}.self_attn.out_proj.{end}"]
            found[f"{new}.ln_1.{end}"] = tensors[f"{old}.layer_norm1.{end}"]
            found[f"{new}.ln_2.{end}"] = tensors[f"{old}.layer_norm2.{end}"]
            found[f"{new}.mlp.c_fc.{end}"] = tensors[f"{old}.mlp.fc1.{end}"]
            found[f"{new}.mlp.c_proj.{end}"] = tensors[f"{old}.mlp.fc2.{end}"]
    return found


def as_timm(tensors: Tensors) -> Tensors:
    """The same tower as timm stores its CLIP models."""
    new = {
        "visual.transformer.resblocks": "blocks",
        "visual.class_embedding": "cls_token",
        "visual.positional_embedding": "pos_embed",
        "visual.conv1": "patch_embed.proj",
        "visual.ln_pre": "norm_pre",
        "visual.ln_post": "norm",
        "attn.in_proj_": "attn.qkv.",
        "attn.out_proj": "attn.proj",
        "ln_": "norm",
        "c_fc": "fc1",
        "c_proj": "fc2",
    }
    found = {}
    for name, tensor in as_open_clip(tensors).items():
        for old, replacement in new.items():
            name = name.replace(old, replacement)
        found[name] = tensor[None] if name == "pos_embed" else tensor[None, None] if name == "cls_token" else tensor
    return found


def as_transformers(tensors: Tensors) -> Tensors:
    return {f"vision_model.{name}": tensor for name, tensor in tensors.items()}


LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "transformers": as_transformers,
    "open_clip": as_open_clip,
    "timm": as_timm,
    "open_clip in training": lambda tensors: tiny.renamed(as_open_clip(tensors), "", "module."),
    "task vectors": lambda tensors: tiny.renamed(as_open_clip(tensors), "", "image_encoder.model."),
}


def tower() -> Tensors:
    return {name: tensor.clone() for name, tensor in tiny.hf_vision().state_dict().items()}


def test_the_layouts_are_those_of_the_libraries() -> None:
    """The other libraries, open_clip and timm, load the tower and compute what transformers computes."""
    x = tiny.randn(2, 3, 8, 8)
    model = tiny.hf_vision()
    expected = model(x).pooler_output
    other = tiny.open_clip_model()
    converted = tiny.renamed(as_open_clip(tower()), "visual.", "")
    other.visual.load_state_dict(converted | {"proj": torch.eye(8)})
    torch.testing.assert_close(other.visual(x), expected, rtol=1e-5, atol=1e-5)
    sizes: dict[str, Any] = {"img_size": 8, "patch_size": 4, "depth": 2, "embed_dim": 8, "num_heads": 2, "mlp_ratio": 2}
    with tiny.seeded():
        third = timm.create_model("vit_base_patch32_clip_quickgelu_224", num_classes=0, **sizes).eval()
    third.load_state_dict(as_timm(tower()))
    torch.testing.assert_close(third(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("own", LAYOUTS)
@pytest.mark.parametrize("other", LAYOUTS)
def test_a_merge_does_not_depend_on_the_layout_of_either_side(own: str, other: str) -> None:
    """The same hash of the merged layers, whatever library wrote which model."""
    base, expert = tower(), tiny.tuned(tower(), 1)
    expected = tiny.fresh(base)
    expected.fold(expert, "task1")
    merger = tiny.fresh(LAYOUTS[own](base))
    report = merger.fold(LAYOUTS[other](expert), "task1")
    assert merger.fingerprint() == expected.fingerprint()
    assert report.incoming == expected.reports[0].incoming
    assert report.notes == ()
    tiny.assert_same(merger.merged, LAYOUTS[own](expected.merged))


@pytest.mark.parametrize("method", [TaskArithmetic, OPCM, KnOTSTies, IsoC])
@pytest.mark.parametrize("other", ["open_clip", "timm"])
def test_methods_that_merge_every_parameter_cross_layouts_too(method: Any, other: str) -> None:
    """Biases, norms and embeddings have counterparts as well."""
    base, expert = tower(), tiny.tuned(tower(), 1)
    expected, merger = ContinualMerger(base, method()), ContinualMerger(base, method())
    expected.fold(expert, "task1")
    merger.fold(LAYOUTS[other](expert), "task1")
    tiny.assert_same(merger.merged, expected.merged)
    assert merger.fingerprint() != merger.reference


def test_real_two_tower_models_cross_layouts() -> None:
    """The text towers beside them do not get in the way, in either direction."""
    hf, oc = tiny.hf_clip().state_dict(), tiny.open_clip_model().state_dict()
    for base, incoming in ((hf, oc), (oc, hf)):
        merger = ContinualMerger(base, Add())
        merger.fold(incoming, "task1")
        found = merger.merged
        name = "vision_model.encoder.layers.1.self_attn.k_proj.weight"
        fused = "visual.transformer.resblocks.1.attn.in_proj_weight"
        if base is hf:
            torch.testing.assert_close(found[name], oc[fused][8:16], rtol=0, atol=1e-6)
        else:
            torch.testing.assert_close(found[fused][8:16], hf[name], rtol=0, atol=1e-6)
        assert all(torch.equal(found[n], base[n]) for n in base if "text" in n or n.startswith("transformer."))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
def test_biases_of_an_adapter_of_a_fused_layout_are_cut_for_a_base_that_is_not(tmp_path: Path) -> None:
    """One bias of q, k and v was saved; the base has three."""
    sizes: dict[str, Any] = {"img_size": 8, "patch_size": 4, "depth": 2, "embed_dim": 8, "num_heads": 2, "mlp_ratio": 2}
    model = timm.create_model("vit_base_patch32_clip_quickgelu_224", num_classes=0, **sizes)
    model.load_state_dict(as_timm(tower()))
    expert = unloaded(trained(model, tmp_path / "adapter", target_modules=["qkv", "fc1"], bias="all"))
    found, expected = ContinualMerger(tower(), OPCM()), ContinualMerger(tower(), OPCM())
    found.fold(tmp_path / "adapter", "task1")
    expected.fold(expert, "task1")
    bias = "encoder.layers.1.self_attn.k_proj.bias"
    assert not torch.equal(found.merged[bias], tower()[bias])
    for name, tensor in expected.merged.items():
        torch.testing.assert_close(found.merged[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("other", LAYOUTS)
def test_the_individual_row_scores_an_expert_of_another_layout_whole(other: str) -> None:
    expert = tiny.tuned(tower(), 1)
    found = expert_weights(tiny.hf_vision(), LAYOUTS[other](expert))
    tiny.assert_same(found, {name: tensor for name, tensor in expert.items() if tensor.is_floating_point()})


def test_shapes_and_dtypes_are_those_of_the_assembled_tensors() -> None:
    incoming = open_checkpoint({name: tensor.bfloat16() for name, tensor in as_timm(tower()).items()})
    shapes = {name: tuple(tensor.shape) for name, tensor in tower().items() if tensor.is_floating_point()}
    found = convert_layout(open_checkpoint(tower()), tiny.only_weights(tower()), incoming)
    assert found is not None
    assert list(found) == list(shapes)
    assert len(found) == len(shapes)
    assert found.shapes() == {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
    assert {found.dtype(name) for name in found} == {torch.bfloat16}


def test_gpt2_is_turned_for_a_base_that_is_upright() -> None:
    """A decoder named like Llama with GPT-2's sizes; square and fused matrices land upright."""
    width, tensors = 4, {}
    for part, shape in (("q", (4, 4)), ("k", (4, 4)), ("v", (4, 4)), ("o", (4, 4))):
        tensors[f"model.layers.0.self_attn.{part}_proj.weight"] = tiny.randn(*shape, seed=ord(part))
    q, k, v, o = tensors.values()
    gpt2 = {"transformer.h.0.attn.c_attn.weight": torch.cat([q, k, v]).T, "transformer.h.0.attn.c_proj.weight": o.T}
    assert gpt2["transformer.h.0.attn.c_attn.weight"].shape == (width, 3 * width)
    for base, incoming in ((tensors, gpt2), (gpt2, tensors)):
        shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
        found = convert_layout(open_checkpoint(base), list(base), open_checkpoint(incoming))
        assert found is not None
        tiny.assert_same({name: found[name].contiguous() for name in found}, base)
        assert found.shapes() == shapes


# refused


def refusal(base: Tensors, incoming: Tensors, **settings: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        ContinualMerger(base, Add(), **settings).fold(incoming, "task1")
    return str(caught.value)


def test_another_size_is_refused_with_both_shapes() -> None:
    incoming = as_open_clip(tower()) | {"visual.transformer.resblocks.0.attn.in_proj_weight": torch.zeros(24, 9)}
    message = refusal(tower(), incoming)
    assert "`encoder.layers.0.self_attn.k_proj.weight` has shape (8, 9)" in message
    assert "(8, 8)" in message


def test_a_missing_block_is_no_match() -> None:
    """All layers or none."""
    incoming = {name: tensor for name, tensor in as_open_clip(tower()).items() if "resblocks.1" not in name}
    assert "lacks 10 of 10" in refusal(tower(), incoming)


def test_a_tensor_without_counterpart_is_named() -> None:
    """Only the matrices that a layout is known for can cross it; a method that wants more says which it lacks."""
    base = tower() | {"encoder.layers.0.gate.weight": torch.zeros(8, 8)}
    message = refusal(base, as_open_clip(tower()), layers=["*.q_proj.weight", "*.gate.weight"])
    assert re.search(r"no known counterpart of 1 of 3 tensors, first `encoder\.layers\.0\.gate\.weight`", message)


def test_prefixes_are_not_mixed_within_one_model() -> None:
    """Two towers side by side, or a model in two halves."""
    half = as_open_clip(tower())
    mixed = {("a." if ".0." in name else "b.") + name: tensor for name, tensor in half.items()}
    twice = tiny.renamed(half, "", "student.") | tiny.renamed(half, "", "teacher.")
    for incoming in (mixed, twice):
        assert layer_index(open_checkpoint(incoming)) == {}
        assert "lacks" in refusal(tower(), incoming)


def test_the_same_layout_under_a_foreign_prefix_is_not_taken_for_another_layout() -> None:
    """One block is wanted, the file holds only the other: no way round."""
    base = open_checkpoint(tower())
    wanted = [name for name in tower() if "layers.0.self_attn" in name and name.endswith("weight")]
    incoming = open_checkpoint({name: tensor for name, tensor in tower().items() if "layers.1" in name})
    assert convert_layout(base, wanted, incoming) is None
    assert convert_layout(base, wanted, open_checkpoint(tiny.renamed(tower(), "", "head_0."))) is None


def test_a_fused_matrix_without_three_parts_is_no_match() -> None:
    """Grouped heads."""
    incoming = as_timm(tower()) | {"blocks.0.attn.qkv.weight": torch.zeros(20, 8)}
    assert "lacks 10 of 10" in refusal(tower(), incoming)


def test_a_layout_is_converted_only_where_names_differ() -> None:
    base = open_checkpoint(tower())
    names = tiny.only_weights(tower())
    wanted = {name: tensor for name, tensor in tower().items() if name in names}
    for layout in (as_transformers, as_open_clip):
        found = align(base, names, open_checkpoint(layout(tower())))
        tiny.assert_same(found, wanted)
        assert (list(found.names.values()) == names) == (layout is as_open_clip)
    other = convert_layout(base, names, open_checkpoint(as_open_clip(tower())))
    assert other is not None
    tiny.assert_same(other, {name: tensor for name, tensor in tower().items() if tensor.is_floating_point()})
