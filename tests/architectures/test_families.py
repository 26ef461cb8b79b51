"""Names and layouts of the families of models: what is merged in each, on tiny models saved by their own libraries."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import notes_but_head
from tiny_families import DECODER, FAMILIES, Shapes, hf, in_memory, llava, on_disk, shifted

from safemerge_pl.architectures.families import block_of, is_known
from safemerge_pl.architectures.layers import find_unknown, select_layers
from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.live import LiveMerger
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, TaskArithmetic

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # DeBERTa before transformers 5.24


def matrices_in_blocks(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    return {name for name, shape in shapes.items() if block_of(name) and len(shape) == 2 and min(shape) > 1}


def parts(shapes: Shapes) -> set[str]:
    """Canonical names without tower and block."""
    return {re.sub(r"^\w+\.\d+\.(?:blocks\.\d+\.|\d+\.)?", "", layer.name) for layer in select_layers(shapes)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_block_is_merged_or_left_on_purpose(family: str, tmp_path: Path) -> None:
    """No family is merged by half without a word."""
    build, merged, left = FAMILIES[family]
    shapes = on_disk(build(), tmp_path)
    layers = select_layers(shapes)
    assert parts(shapes) == merged
    assert len({layer.name for layer in layers}) == len(layers)
    others = matrices_in_blocks(shapes) - {layer.parameter for layer in layers}
    start = r"^.*(?:(?:layers?|blocks?|h|features\.\d+)\.\d+|encoder_layer_\d+)\."
    places = {re.sub(start + r"|\.weight$", "", name) for name in others}
    assert {place for place in places if not re.search("relative_position|cpb_mlp", place)} <= left
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


RENAMED = ["ViT", "BEiT", "DINOv2", "DINOv2, gated", "DINOv3", "Swin"]


@pytest.mark.parametrize("method", [TaskArithmetic, OPCM])
@pytest.mark.parametrize("build", [llava, *(FAMILIES[name][0] for name in RENAMED)], ids=["LLaVA", *RENAMED])
def test_a_method_of_every_parameter_finds_all_that_is_renamed(
    build: Callable[[], Any], method: Any, tmp_path: Path
) -> None:
    """Biases, norms, embeddings and heads of a module are in its file, under other names; and are written there."""
    base, expert = build(), shifted(build())
    base.save_pretrained(tmp_path / "base")
    expert.save_pretrained(tmp_path / "expert")
    expected = ContinualMerger(tmp_path / "base", method())
    expected.fold(tmp_path / "expert", task="a")
    found = ContinualMerger(tmp_path / "base", method())
    assert notes_but_head(found.fold(expert, task="a")) == ()
    tiny.assert_same(found.merged, expected.merged)
    merger = ContinualMerger(base, method())
    assert notes_but_head(merger.fold(tmp_path / "expert", task="a")) == ()
    merger.save(tmp_path / "out", template=tmp_path / "base")
    tiny.assert_same(tiny.copied(open_checkpoint(tmp_path / "out")), expected.merged)


def test_experts_that_are_fused_in_memory_are_said_to_be(tmp_path: Path) -> None:
    """Transformers joins all experts of a block in memory; no name of the file is there any more."""
    model: Any = FAMILIES["Mixtral"][0]()
    model.save_pretrained(tmp_path / "base")
    for base, incoming in ((tmp_path / "base", model), (model, tmp_path / "base")):
        with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj`.*give both as folders,? or both in memory"):
            ContinualMerger(base, TaskArithmetic()).fold(incoming, task="a")


def test_a_model_that_has_no_known_counterpart_says_what_is_called_otherwise() -> None:
    """Of each tower, where a method needs more than the matrices that are known."""
    start = "vision_model.encoder.layers.0."
    base = {f"{start}self_attn.{part}_proj.weight": tiny.randn(8, 8, seed=3) for part in ("q", "k", "v", "out")}
    base |= {f"{start}mlp.fc1.weight": tiny.randn(16, 8), "vision_model.own.weight": tiny.randn(3, 8)}
    q, k, v, out, up, _ = base.values()
    block = "visual.transformer.resblocks.0."
    incoming = {f"{block}attn.in_proj_weight": torch.cat([q, k, v]), f"{block}attn.out_proj.weight": out}
    with pytest.raises(CheckpointError) as caught:
        ContinualMerger(base, TaskArithmetic()).fold(incoming | {f"{block}mlp.c_fc.weight": up}, task="a")
    assert (
        f"first `vision_model.own.weight` (`{start}self_attn.q_proj.weight` is `{block}attn.in_proj_weight` there)"
        in (str(caught.value))
    )


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


LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}


@pytest.mark.parametrize(
    ("build", "merged", "noted"),
    [
        (
            hf("Qwen3_5ForCausalLM", since="5.2", **DECODER, head_dim=4, **LINEAR),
            {"q", "k", "v", "gate", "out"},
            "in_proj_b",
        ),
        (hf("Qwen3NextForCausalLM", **DECODER, head_dim=4, **LINEAR, **EXPERTS), {"out"}, "in_proj_qkvz"),
        (
            hf("OlmoHybridForCausalLM", since="5.3", **DECODER, layer_types=LINEAR["layer_types"]),
            {"q", "k", "v", "gate", "out"},
            "a_proj",
        ),
    ],
    ids=["Qwen3.5", "Qwen3-Next", "OLMo hybrid"],
)
def test_linear_attention_is_merged_where_its_cut_is_known_and_the_rest_is_named(
    build: Callable[[], Any], merged: set[str], noted: str
) -> None:
    """Hybrids have it in three layers of four; what is fused head by head is no reason to refuse them."""
    merger = ContinualMerger(build(), tiny.fast_method())
    names = {layer.name.partition("linear.")[2] for layer in merger.layers if ".linear." in layer.name}
    assert names == merged
    assert {"model.1.q", "model.1.k", "model.1.v", "model.1.out"} <= {layer.name for layer in merger.layers}
    (note,) = notes_but_head(merger.fold(shifted(build()), "task"))
    assert re.search(rf"left pretrained: .*linear_attn\.{noted}", note)


def test_rows_of_a_linear_attention_are_cut_where_the_model_cuts_them() -> None:
    """Queries and keys of fewer heads, then values; each follows from the model's own split."""
    model: Any = hf("Qwen3_5ForCausalLM", since="5.2", **DECODER, head_dim=4, **LINEAR)()
    attention = model.model.layers[0].linear_attn
    found = {layer.name: layer.rows for layer in select_layers(in_memory(model)) if layer.rows}
    ends = (attention.key_dim, 2 * attention.key_dim, 2 * attention.key_dim + attention.value_dim)
    assert list(found.values()) == [(0, ends[0]), (ends[0], ends[1]), (ends[1], ends[2])]
    alone = {"model.layers.0.linear_attn.in_proj_qkv.weight": (40, 16)}
    with pytest.raises(ValueError, match="no output projection beside it tells how many rows are values"):
        select_layers(alone)


def test_a_lightning_attention_that_fuses_head_by_head_under_phi_3_s_name_is_refused() -> None:
    model = hf(
        "MiniMaxForCausalLM", **DECODER, layer_types=["linear_attention", "full_attention"], num_local_experts=2
    )()
    with pytest.raises(
        ValueError, match=r"`model\.layers\.0\.self_attn\.qkv_proj\.weight` holds .*`output_gate`.*`layers`"
    ):
        ContinualMerger(model, tiny.fast_method())
    layers = select_layers(in_memory(model), ["*.qkv_proj.weight", "*.q_proj.weight"])
    assert [layer.shape for layer in layers] == [(48, 16), (16, 16)]


@pytest.mark.parametrize("family", ["torchvision ViT", "torchvision Swin", "torchvision Swin 2"])
def test_torchvision_loads_what_was_merged(family: str, tmp_path: Path) -> None:
    """A state dict of torchvision, saved by torch, folded in and given back to the class."""
    base = FAMILIES[family][0]()
    torch.save(base.state_dict(), tmp_path / "base.pth")
    torch.save(shifted(FAMILIES[family][0]()).state_dict(), tmp_path / "expert.pth")
    merger = ContinualMerger(tmp_path / "base.pth", tiny.fast_method())
    report = merger.fold(tmp_path / "expert.pth", "task")
    assert notes_but_head(report) == ()
    changed = {row.layer for row in report.layers if row.task_norm}
    assert changed == {layer.name for layer in merger.layers}
    merger.save(tmp_path / "out")
    loaded = FAMILIES[family][0]()
    loaded.load_state_dict(dict(open_checkpoint(tmp_path / "out")))
    tiny.assert_same(tiny.copied(loaded.state_dict()), merger.merged)
    assert any(not torch.equal(tensor, base.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_an_older_name_of_torchvision_s_feed_forward_is_known() -> None:
    """Before 0.13 a ViT had `linear_1` and `linear_2`."""
    start = "encoder.layers.encoder_layer_0."
    shapes = {f"{start}mlp.linear_1.weight": (32, 8), f"{start}mlp.linear_2.weight": (8, 32)}
    layers = select_layers(shapes)
    assert [layer.name for layer in layers] == ["vision.0.up"]
    assert find_unknown(layers, shapes) == []


@pytest.mark.parametrize("build", ["resnet18", "convnext_tiny", "efficientnet_b0", "mobilenet_v3_small", "vgg11"])
def test_convolutional_models_of_torchvision_have_no_block_of_a_transformer(build: str) -> None:
    """`features.1.0` is a block of a Swin, and of nothing else."""
    import torchvision

    with torch.device("meta"):
        shapes = in_memory(getattr(torchvision.models, build)())
    with pytest.raises(ValueError, match="none of the"):
        select_layers(shapes)
