"""Names and layouts of the families of models: what is merged in each, on tiny models saved by their own libraries."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny_families import DECODER, FAMILIES, Shapes, hf, in_memory, llava, on_disk, shifted

from safemerge_pl.architectures.families import block_of, is_known
from safemerge_pl.architectures.layers import find_unknown, select_layers, vision_only
from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.live import LiveMerger
from safemerge_pl.merger import ContinualMerger

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # DeBERTa before transformers 5.24


def matrices_in_blocks(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    return {name for name, shape in shapes.items() if block_of(name) and len(shape) == 2 and min(shape) > 1}


def parts(shapes: Shapes) -> set[str]:
    """Canonical names without tower and block."""
    return {re.sub(r"^\w+\.\d+\.(?:blocks\.\d+\.)?", "", layer.name) for layer in select_layers(shapes)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_block_is_merged_or_left_on_purpose(family: str, tmp_path: Path) -> None:
    """No family is merged by half without a word."""
    build, merged, left = FAMILIES[family]
    shapes = on_disk(build(), tmp_path)
    layers = select_layers(shapes)
    assert parts(shapes) == merged
    assert len({layer.name for layer in layers}) == len(layers)
    others = matrices_in_blocks(shapes) - {layer.parameter for layer in layers}
    places = {re.sub(r"^.*(?:layers?|blocks?|h)\.\d+\.|\.weight$", "", name) for name in others}
    assert {place for place in places if "relative_position" not in place} <= left
    assert others, "the output side of the feed-forward stays pretrained"
    assert find_unknown(layers, shapes) == []


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"Mixtral", "Qwen2-MoE", "DeepSeek-V3"}))
def test_a_model_in_memory_has_the_canonical_names_of_its_file(family: str, tmp_path: Path) -> None:
    """transformers 5 renames some models when it loads them."""
    model = FAMILIES[family][0]()
    file, memory = select_layers(on_disk(model, tmp_path)), select_layers(in_memory(model))
    assert {layer.name: layer.shape for layer in file} == {layer.name: layer.shape for layer in memory}


def test_fused_heads_of_unequal_number_are_cut_where_the_model_cuts_them() -> None:
    """Phi-3 has q of all heads, then k and v of fewer."""
    model: Any = hf("Phi3ForCausalLM", **DECODER)()
    layers = {layer.name: layer for layer in select_layers(in_memory(model))}
    rows = {part: layers[f"model.0.{part}"].rows for part in ("q", "k", "v", "gate", "up")}
    assert rows == {"q": (0, 16), "k": (16, 24), "v": (24, 32), "gate": (0, 24), "up": (24, 48)}
    feed, x = model.model.layers[0].mlp, tiny.randn(3, 16)
    fused = feed.gate_up_proj.weight
    gate, up = (layers[f"model.0.{part}"].view(fused) for part in ("gate", "up"))
    torch.testing.assert_close(feed.down_proj(x @ up.T * feed.activation_fn(x @ gate.T)), feed(x))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gpt_neox.layers.0.attention.query_key_value.weight", (48, 16)),
        ("transformer.h.0.self_attention.query_key_value.weight", (48, 16)),
        ("transformer.h.0.attn.c_attn.weight", (48, 16)),  # upright: StarCoder or Qwen, not GPT-2
        ("transformer.h.0.attn.qkv_proj.weight", (48, 16)),  # CodeGen
        ("model.layers.0.attention.wqkv.weight", (32, 16)),  # InternLM 2
    ],
)
def test_heads_fused_in_an_order_that_the_name_does_not_tell_are_refused(name: str, shape: tuple[int, int]) -> None:
    """The way out takes the matrix whole."""
    shapes = {name: shape, "transformer.h.0.mlp.dense_h_to_4h.weight": (64, 16)}
    with pytest.raises(ValueError, match=rf"`{re.escape(name)}` holds q, k and v .*`layers`"):
        select_layers(shapes)
    assert [layer.shape for layer in select_layers(shapes, [name])] == [shape]


def test_gpt_neo_shares_a_name_with_gpt2_but_stores_it_upright() -> None:
    model = hf("GPTNeoModel", hidden_size=16, num_layers=1, num_heads=4, attention_types=[[["global"], 1]])()
    layers = {layer.name: layer for layer in select_layers(in_memory(model))}
    assert (layers["model.0.up"].shape, layers["model.0.up"].transposed) == ((64, 16), False)


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


@pytest.mark.parametrize(
    "build",
    [llava, *(FAMILIES[name][0] for name in ("ViT", "DINOv2", "Swin"))],
    ids=["LLaVA", "ViT", "DINOv2", "Swin"],
)
def test_a_model_in_memory_and_its_file_give_one_merge(build: Callable[[], Any], tmp_path: Path) -> None:
    """Transformers 5 has other names in memory than in files."""
    base, expert = build(), shifted(build())
    base.save_pretrained(tmp_path / "base")
    expert.save_pretrained(tmp_path / "expert")
    merges = set()
    for pretrained in (base, tmp_path / "base"):
        for incoming in (expert, tmp_path / "expert"):
            merger = ContinualMerger(pretrained, tiny.fast_method())
            merges.add(merger.fold(incoming, task="a").merged)
    assert len(merges) == 1


@pytest.mark.parametrize("build", [llava, FAMILIES["ViT"][0]], ids=["LLaVA", "ViT"])
def test_a_model_merged_in_memory_is_written_in_the_layout_of_a_template(
    build: Callable[[], Any], tmp_path: Path
) -> None:
    base = build()
    base.save_pretrained(tmp_path / "base")
    merger = ContinualMerger(base, tiny.fast_method())
    merger.fold(shifted(build()), task="a")
    merger.save(tmp_path / "out", template=tmp_path / "base")
    folders = [open_checkpoint(tmp_path / name) for name in ("base", "out")]
    assert folders[0].shapes() == folders[1].shapes()
    loaded = type(base).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in merger.merged.items() if name in loaded)
    with pytest.raises(CheckpointError, match="lacks"):
        merger.save(tmp_path / "other", template={"layers.0.attention.q_proj.weight": torch.zeros(16, 16)})
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("build", [llava, FAMILIES["ViT"][0]], ids=["LLaVA", "ViT"])
def test_a_module_is_given_its_pretrained_weights_from_a_file_with_other_names(
    build: Callable[[], Any], tmp_path: Path
) -> None:
    base = build()
    base.save_pretrained(tmp_path / "base")
    trained = shifted(build())
    merger = LiveMerger(trained, tiny.fast_method(), pretrained=tmp_path / "base")
    merger.restart()
    assert all(torch.equal(tensor, base.state_dict()[name]) for name, tensor in trained.state_dict().items())


def test_a_file_without_a_part_of_the_module_is_refused_not_filled_at_random(tmp_path: Path) -> None:
    FAMILIES["ViT"][0]().vit.save_pretrained(tmp_path / "base")  # type: ignore[union-attr,operator]
    with pytest.raises(CheckpointError, match="lacks"):
        LiveMerger(FAMILIES["ViT"][0](), tiny.fast_method(), pretrained=tmp_path / "base")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_factors_for_the_language_model_of_a_vision_language_model_find_their_place(tmp_path: Path) -> None:
    """G: trained on the names in memory, folded into a file."""
    import peft

    base = llava()
    base.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=r".*language_model.*[qv]_proj"))
    with torch.no_grad():
        for index, (name, parameter) in enumerate(adapted.named_parameters()):
            if "lora_B" in name:
                parameter.copy_(0.1 * tiny.randn(*parameter.shape, seed=index))
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "dense")
    merges = []
    for incoming in ("adapter", "dense"):
        merger = ContinualMerger(tmp_path / "base", tiny.fast_method(use_recovery=False))
        report = merger.fold(tmp_path / incoming, task="a")
        merges.append(report.merged)
        changed = {row.layer for row in report.layers if row.task_norm}
        assert changed == {f"model.{i}.{part}" for i in (0, 1) for part in "qv"}
    assert merges[0] == merges[1]


def test_a_table_of_position_biases_is_no_linear_layer() -> None:
    """Swin's are looked up."""
    shapes = in_memory(FAMILIES["Swin"][0]())
    assert any("bias_table" in name for name in shapes)
    assert not any("bias_table" in layer.parameter for layer in select_layers(shapes, scope="linear"))


def test_encoder_and_decoder_are_called_so() -> None:
    names = {layer.name.partition(".")[0] for layer in select_layers(in_memory(FAMILIES["Whisper"][0]()))}
    assert names == {"encoder", "decoder"}


def test_what_is_passed_over_is_said_at_the_first_fold_and_only_then() -> None:
    """Packed experts of a model in memory."""
    model = FAMILIES["Mixtral"][0]()
    tuned = tiny.tuned(model.state_dict(), 1)
    merger = ContinualMerger(model, tiny.fast_method())
    notes = merger.fold(tuned, task="a").notes
    assert [note for note in notes if "of no known kind and left pretrained: 4 of the matrices" in note]
    assert not merger.fold({name: 2 * tensor for name, tensor in tuned.items()}, task="b").notes
    chosen = ContinualMerger(model, tiny.fast_method(), layers=["*.q_proj.weight"])
    assert not chosen.fold(tuned, task="a").notes


@pytest.mark.parametrize("family", ["BERT", "ViT", "Whisper", "Phi-3", "Mixtral"])
def test_a_merged_folder_loads_with_the_family_s_own_class(family: str, tmp_path: Path) -> None:
    model: Any = FAMILIES[family][0]()
    model.save_pretrained(tmp_path / "base")
    shifted(model).save_pretrained(tmp_path / "expert")
    merger = ContinualMerger(tmp_path / "base", tiny.fast_method())
    merger.fold(tmp_path / "expert", task="a")
    merger.save(tmp_path / "out")
    loaded, found = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    base = type(model).from_pretrained(tmp_path / "base").state_dict()
    changed = [name for name, tensor in loaded.state_dict().items() if not torch.equal(tensor, base[name])]
    assert len(changed) >= len(matrices_in_blocks(in_memory(model))) / 2


@pytest.mark.parametrize(
    "name", ["layers.0.mixer.conv1d.weight", "layers.0.input_layernorm.weight", "layers.0.mlp.router.weight"]
)
def test_what_is_no_matrix_is_not_reported(name: str) -> None:
    assert is_known(name, (8, 8))
