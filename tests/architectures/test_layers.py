"""Which matrices are merged, on real tiny models of every family; views into them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from tiny_families import FAMILIES as TRANSFORMERS
from tiny_families import in_memory, llava, on_disk
from torch import Tensor, nn
from torch.nn import functional as F

from safemerge_pl.architectures.layers import MergeLayer, select_layers, vision_only
from safemerge_pl.merger import ContinualMerger


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def selected(model: nn.Module, patterns: list[str] | None = None) -> dict[str, MergeLayer]:
    layers = select_layers(shapes_of(model), patterns)
    assert len({layer.name for layer in layers}) == len(layers)
    return {layer.name: layer for layer in layers}


FAMILIES: list[tuple[Callable[[], nn.Module], int]] = [
    (tiny.hf_vision, 10),
    (tiny.hf_clip, 10),
    (tiny.open_clip_model, 10),
    (tiny.timm_vit, 10),
    (tiny.hf_t5, 3 * 4 + 4 + 3 * 2),
    (tiny.hf_llama, 12),
    (tiny.hf_gpt2, 10),
    (tiny.hf_mixtral, 4),
]


@pytest.mark.parametrize(("build", "count"), FAMILIES, ids=lambda value: getattr(value, "__name__", None))
def test_every_selected_layer_is_a_matrix_of_the_model_and_no_name_comes_twice(
    build: Callable[[], nn.Module], count: int
) -> None:
    model = build()
    layers = selected(model)
    assert len(layers) == count
    tensors = model.state_dict()
    for layer in layers.values():
        assert layer.view(tensors[layer.parameter]).shape == layer.shape
    order = [list(tensors).index(layer.parameter) for layer in layers.values()]
    assert order == sorted(order)


@pytest.mark.parametrize("build", [tiny.hf_vision, tiny.hf_clip, tiny.open_clip_model, tiny.timm_vit])
def test_a_vision_tower_has_the_same_canonical_names_in_every_library(build: Callable[[], nn.Module]) -> None:
    assert sorted(selected(build())) == sorted(tiny.CLIP_NAMES)


def test_the_vision_model_prefix_that_came_and_went_does_not_matter() -> None:
    bare = select_layers(shapes_of(tiny.hf_vision()))
    legacy = select_layers({f"vision_model.{name}": shape for name, shape in shapes_of(tiny.hf_vision()).items()})
    assert [layer.name for layer in legacy] == [layer.name for layer in bare]
    assert [layer.parameter for layer in legacy] == [f"vision_model.{layer.parameter}" for layer in bare]


@pytest.mark.parametrize(
    ("build", "tower"), [(tiny.hf_clip, "vision_model."), (tiny.open_clip_model, "visual.")], ids=["hf", "open_clip"]
)
def test_only_the_vision_tower_of_two_is_merged(build: Callable[[], nn.Module], tower: str) -> None:
    assert all(layer.parameter.startswith(tower) for layer in selected(build()).values())


def test_clip_merges_attention_and_the_first_feed_forward_matrix_only() -> None:
    """The patch embedding is a convolution and stays out, and so do position embeddings."""
    parts = {layer.parameter.split(".", 3)[3] for layer in selected(tiny.hf_vision()).values()}
    attention = {f"self_attn.{part}_proj.weight" for part in ("q", "k", "v", "out")}
    assert parts == attention | {"mlp.fc1.weight"}


def test_gated_t5_merges_all_attention_and_both_input_matrices() -> None:
    """No bias table, no embedding; wi_0 and wi_1, never wo."""
    layers = selected(tiny.hf_t5("gated-gelu"))
    expected = {
        f"encoder.{i}.{part}" for i in (0, 1) for part in ("self.q", "self.k", "self.v", "self.o", "wi_0", "wi_1")
    }
    expected |= {f"decoder.0.{attention}.{part}" for attention in ("self", "cross") for part in "qkvo"}
    assert set(layers) == expected | {"decoder.0.wi_0", "decoder.0.wi_1"}
    assert layers["decoder.0.cross.k"].parameter == "decoder.block.0.layer.1.EncDecAttention.k.weight"
    assert not any(re.search(r"relative|embed|shared|lm_head|\.wo\.", layer.parameter) for layer in layers.values())


def test_ungated_t5_merges_its_one_input_matrix() -> None:
    assert {name for name in selected(tiny.hf_t5("relu")) if "wi" in name} == {
        "encoder.0.wi",
        "encoder.1.wi",
        "decoder.0.wi",
    }


def test_grouped_query_attention_keeps_its_unequal_heights() -> None:
    layers = selected(tiny.hf_llama())
    found = {name: layer.shape for name, layer in layers.items() if name.startswith("model.1.")}
    assert found == {
        "model.1.q": (8, 8),
        "model.1.k": (4, 8),
        "model.1.v": (4, 8),
        "model.1.out": (8, 8),
        "model.1.gate": (16, 8),
        "model.1.up": (16, 8),
    }


def test_packed_experts_are_left_alone_and_refused_when_asked_for() -> None:
    model = tiny.hf_mixtral()
    assert set(selected(model)) == {"model.0.q", "model.0.k", "model.0.v", "model.0.out"}
    with pytest.raises(ValueError, match="layers"):
        selected(model, ["*.experts.*"])


def test_gpt2_weights_are_turned_upright() -> None:
    """An upright view is what nn.Linear holds, checked against the library's own forward pass."""
    model = tiny.hf_gpt2()
    layers = selected(model)
    assert layers["model.0.up"].shape == (32, 8)
    assert layers["model.0.q"].shape == (8, 8)
    tensors, x = model.state_dict(), tiny.randn(3, 8)
    attention = model.transformer.h[0].attn
    fused = attention.c_attn(x) - attention.c_attn.bias
    for part, expected in zip("qkv", fused.split(8, dim=1), strict=True):
        layer = layers[f"model.0.{part}"]
        torch.testing.assert_close(F.linear(x, layer.view(tensors[layer.parameter])), expected)
    up = model.transformer.h[0].mlp.c_fc
    torch.testing.assert_close(F.linear(x, layers["model.0.up"].view(up.weight)), up(x) - up.bias)


def projections_of_open_clip(model: nn.Module) -> tuple[str, Tensor]:
    return "visual.transformer.resblocks.0.attn.in_proj_weight", model.visual.transformer.resblocks[
        0
    ].attn.in_proj_weight


def projections_of_timm(model: nn.Module) -> tuple[str, Tensor]:
    return "blocks.0.attn.qkv.weight", model.blocks[0].attn.qkv.weight


@pytest.mark.parametrize(
    ("build", "find"),
    [(tiny.open_clip_model, projections_of_open_clip), (tiny.timm_vit, projections_of_timm)],
    ids=["open_clip", "timm"],
)
def test_fused_projections_are_cut_in_q_k_v_and_share_memory(
    build: Callable[[], nn.Module], find: Callable[[nn.Module], tuple[str, Tensor]]
) -> None:
    model = build()
    name, fused = find(model)
    width = fused.shape[1]
    layers = selected(model)
    for row, part in enumerate("qkv"):
        layer = layers[f"vision.0.{part}"]
        assert layer.parameter == name
        assert layer.rows == (row * width, (row + 1) * width)
        assert torch.equal(layer.view(fused), fused[row * width : (row + 1) * width])
    with torch.no_grad():
        layers["vision.0.k"].view(fused).fill_(7)
    changed = (fused == 7).all(1).nonzero().flatten().tolist()
    assert changed == list(range(width, 2 * width))


def test_a_transposed_fused_view_shares_memory_and_lands_in_the_right_columns() -> None:
    layer = MergeLayer("model.0.v", "h.0.attn.c_attn.weight", (2, 4), rows=(4, 6), transposed=True)
    stored = torch.zeros(4, 6)
    layer.view(stored).copy_(torch.arange(8.0).view(2, 4))
    assert stored.tolist() == [[0, 0, 0, 0, 0, 4], [0, 0, 0, 0, 1, 5], [0, 0, 0, 0, 2, 6], [0, 0, 0, 0, 3, 7]]


def test_a_fused_matrix_that_has_no_three_equal_parts_is_refused() -> None:
    """Grouped heads in a fused matrix."""
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.qkv\.weight.*\(8, 4\).*3 equal parts"):
        select_layers({"blocks.0.attn.qkv.weight": (8, 4)})


def test_two_towers_of_one_family_do_not_share_a_name() -> None:
    """Names seed the recovery and key the report: one name for two layers would mix them up."""
    name = "layers.0.self_attn.q_proj.weight"
    layers = select_layers({f"left.{name}": (4, 4), f"right.{name}": (4, 4)})
    assert len({layer.name for layer in layers}) == 2


def test_custom_patterns_replace_the_choice_in_the_order_of_the_checkpoint() -> None:
    layers = selected(tiny.hf_vision(), ["*.layers.1.mlp.fc2.weight", "*.layers.0.self_attn.[qk]_proj.weight"])
    assert [(layer.name, layer.parameter) for layer in layers.values()] == [
        ("vision.0.k", "encoder.layers.0.self_attn.k_proj.weight"),
        ("vision.0.q", "encoder.layers.0.self_attn.q_proj.weight"),
        ("encoder.layers.1.mlp.fc2", "encoder.layers.1.mlp.fc2.weight"),
    ]


def test_custom_patterns_still_split_and_turn_what_a_family_fuses() -> None:
    layers = selected(tiny.hf_gpt2(), ["*.1.attn.c_attn.weight"])
    assert [(layer.name, layer.transposed) for layer in layers.values()] == [
        (f"model.1.{part}", True) for part in "qkv"
    ]


def test_custom_patterns_take_any_matrix_of_an_unknown_model_but_no_vector_or_kernel() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Linear(4, 6))
    assert [layer.name for layer in selected(model, ["*"]).values()] == ["2"]
    with pytest.raises(ValueError, match="layers"):
        selected(model, ["0.weight"])


def test_a_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(ValueError, match=r"`layers` pattern '\*\.wq\.weight' matches none of the 39 parameters"):
        selected(tiny.hf_vision(), ["*.q_proj.weight", "*.wq.weight"])


@pytest.mark.parametrize("pattern", ["*.bias", "text_model.*.bias"])
def test_a_pattern_whose_matches_cannot_be_merged_is_named_too(pattern: str) -> None:
    """Vectors, of either tower."""
    with pytest.raises(ValueError, match=re.escape(repr(pattern))):
        selected(tiny.hf_clip(), ["vision_model.*.q_proj.weight", pattern])


def test_an_unknown_model_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"none of the 2 parameters.*`layers`"):
        select_layers({"backbone.stem.weight": (4, 4), "head.bias": (4,)})


# towers, and what is left out


def test_of_a_vision_language_model_both_sides_are_merged(tmp_path: Path) -> None:
    """A CLIP's text tower stays out; a language model that a vision tower feeds is what was fine-tuned."""
    model = llava()
    for shapes in (in_memory(model), on_disk(model, tmp_path)):
        towers = {layer.name.partition(".")[0] for layer in select_layers(shapes)}
        assert towers == {"vision", "model"}


@pytest.mark.parametrize(
    ("names", "towers"),
    [
        (["visual.transformer.resblocks", "transformer.resblocks"], 1),  # open_clip
        (["visual.transformer.resblocks", "text.transformer.resblocks", "text_decoder.resblocks"], 1),  # CoCa
        (["visual.trunk.blocks", "text.transformer.encoder.layer"], 1),  # open_clip with towers of other libraries
        (["vision_model.encoder.layers", "text_model.encoder.layers"], 1),  # CLIP, SigLIP
        (["vision_model.encoder.layers", "text_decoder.bert.encoder.layer"], 2),  # BLIP
        (["vision_model.encoder.layers", "qformer.encoder.layer", "language_model.model.decoder.layers"], 3),  # BLIP-2
        (["visual.blocks", "model.layers"], 2),  # Qwen2-VL
    ],
)
def test_a_text_tower_stays_out_and_a_language_model_does_not(names: list[str], towers: int) -> None:
    assert len(vision_only([f"{name}.0.mlp.fc1.weight" for name in names])) == towers


def test_a_table_of_position_biases_is_no_linear_layer() -> None:
    """Swin's are looked up."""
    shapes = in_memory(TRANSFORMERS["Swin"][0]())
    assert any("bias_table" in name for name in shapes)
    assert not any("bias_table" in layer.parameter for layer in select_layers(shapes, scope="linear"))


def test_encoder_and_decoder_are_called_so() -> None:
    names = {layer.name.partition(".")[0] for layer in select_layers(in_memory(TRANSFORMERS["Whisper"][0]()))}
    assert names == {"encoder", "decoder"}


def test_what_is_passed_over_is_said_at_the_first_fold_and_only_then() -> None:
    """Packed experts of a model in memory."""
    model = TRANSFORMERS["Mixtral"][0]()
    tuned = tiny.tuned(model.state_dict(), 1)
    merger = ContinualMerger(model, tiny.fast_method())
    notes = merger.fold(tuned, task="a").notes
    assert [note for note in notes if "of no known kind and left pretrained: 4 of the matrices" in note]
    assert not tiny.notes_but_head(merger.fold({name: 2 * tensor for name, tensor in tuned.items()}, task="b"))
    chosen = ContinualMerger(model, tiny.fast_method(), layers=["*.q_proj.weight"])
    assert not tiny.notes_but_head(chosen.fold(tuned, task="a"))
