"""An adapter on its base, against what peft itself folds, and refused where it does not fit."""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import tiny
import torch
from safetensors.torch import load_file
from tiny import Add
from tiny_adapters import QV, bound, configured, refusal, rewritten, same, trained, unloaded
from torch import Tensor, nn

from safemerge_pl.callbacks import MergeCallback, ReferenceRows
from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.checkpoints.fit import bind_adapter, fit
from safemerge_pl.commands.check import check_stream
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.scoring import expert_weights
from safemerge_pl.zoo import Zoo

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]  # of peft

VARIANTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "CLIP vision": (tiny.hf_vision, QV, 4),
    "CLIP": (tiny.hf_clip, QV, 6),
    "rsLoRA": (tiny.hf_vision, QV | {"use_rslora": True, "r": 4}, 4),
    "DoRA": (tiny.hf_vision, QV | {"use_dora": True}, 4),
    "ranks and alphas by pattern": (
        tiny.hf_vision,
        {
            "target_modules": ["q_proj", "fc1"],
            "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.fc1": 1},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 5, "fc1": 7},
        },
        4,
    ),
    "T5": (tiny.hf_t5, {"target_modules": ["q", "v", "wi_0"]}, 11),
    "Llama": (tiny.hf_llama, QV | {"use_rslora": True}, 4),
    "GPT-2": (
        tiny.hf_gpt2,
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
        8,
    ),
    "GPT-2 under DoRA": (tiny.hf_gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}, 2),
    "GPT-2 embedding": (tiny.hf_gpt2, {"target_modules": ["wpe", "c_attn"], "fan_in_fan_out": True}, 3),
    "timm": (tiny.timm_vit, {"target_modules": ["qkv", "proj"], "exclude_modules": r".*patch_embed.*"}, 4),
    "open_clip": (tiny.open_clip_model, {"target_modules": ["attn", "c_fc"]}, 9),
    "open_clip, out alone": (tiny.open_clip_model, {"target_modules": ["out_proj"]}, 3),
    "a convolution": (tiny.hf_vision, {"target_modules": ["patch_embedding", "q_proj"]}, 3),
    "a convolution under DoRA": (tiny.hf_vision, {"target_modules": ["patch_embedding"], "use_dora": True}, 1),
    "saved modules": (tiny.hf_vision, QV | {"modules_to_save": ["post_layernorm", "fc1"]}, 10),
    "biases of the adapted layers": (tiny.hf_vision, QV | {"bias": "lora_only"}, 8),
    "all biases": (tiny.hf_vision, QV | {"bias": "all"}, 4 + 2 * 8 + 2),
    "biases of the factors": (tiny.hf_vision, QV | {"lora_bias": True}, 8),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_is_what_peft_makes_of_it(variant: str, tmp_path: Path) -> None:
    """Every tensor of the model, changed or not."""
    build, settings, count = VARIANTS[variant]
    base = tiny.copied(build().state_dict())
    wrapped = trained(build(), tmp_path, **settings)
    found = bound(base, tmp_path)
    expected = unloaded(wrapped)
    assert same(found, expected, base) == count
    assert list(found) == list(base)
    assert len(found) == len(base)
    for name in base:
        assert found.shape(name) == tuple(found[name].shape)
        assert found.dtype(name) == found[name].dtype
    assert found.notes == ()
    fresh = build()
    fresh.load_state_dict(dict(found))  # what transformers, open_clip and timm take as their own


FOLDED = ["CLIP vision", "CLIP", "T5", "GPT-2", "open_clip", "DoRA", "timm"]


@pytest.mark.parametrize("variant", FOLDED)
def test_folding_an_adapter_is_folding_the_model_it_makes(variant: str, tmp_path: Path) -> None:
    """Folded in float32, so the merged weights agree to the last bit or nearly."""
    build, settings, _ = VARIANTS[variant]
    base = tiny.copied(build().state_dict())
    wrapped = trained(build(), tmp_path / "adapter", **settings)
    by_adapter = ContinualMerger(base, Add())
    report = by_adapter.fold(tmp_path / "adapter", "task1")
    by_model = ContinualMerger(base, Add())
    by_model.fold(unloaded(wrapped), "task1")
    assert report.source == str(tmp_path / "adapter")
    for name, tensor in by_model.merged.items():
        torch.testing.assert_close(by_adapter.merged[name], tensor, rtol=1e-6, atol=1e-7)
    assert any(row.task_norm > 0.01 for row in report.layers)


def test_a_half_precision_base_is_added_to_in_float32(tmp_path: Path) -> None:
    """Rounding the sum to the base's dtype would lose most of a small update."""
    base = {name: tensor.bfloat16() for name, tensor in tiny.hf_vision().state_dict().items()}
    trained(tiny.hf_vision(), tmp_path, **QV, r=4)
    name = "encoder.layers.0.self_attn.q_proj.weight"
    factors = load_file(tmp_path / "adapter_model.safetensors")
    key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
    found = bound(base, tmp_path)
    assert found.dtype(name) == torch.float32
    expected = base[name].float() + 6 / 4 * factors[f"{key}B.weight"] @ factors[f"{key}A.weight"]
    torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("prefix", ["", "vision_model.", "module.vision_model.", "model.vision_model."])
@pytest.mark.parametrize("owner", [tiny.hf_vision, tiny.hf_clip])
def test_an_adapter_of_either_class_goes_on_either_base(
    prefix: str, owner: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """Trained on CLIPVisionModel or on CLIPModel; the base is a tower with any prefix."""
    tower = tiny.copied(tiny.hf_vision().state_dict())
    model = owner()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.removeprefix("vision_model.") in tower:
                tensor.copy_(tower[name.removeprefix("vision_model.")])
    wrapped = trained(model, tmp_path, **QV)
    base = {prefix + name: tensor for name, tensor in tower.items()}
    found = bound(base, tmp_path)
    expected = {prefix + name.removeprefix("vision_model."): tensor for name, tensor in unloaded(wrapped).items()}
    assert same(found, expected, base) == 4
    notes = "2 tensors of the adapter have no place in the pretrained model, first `text_model.encoder.layers.0"
    assert [note[: len(notes)] for note in found.notes] == ([notes] if owner is tiny.hf_clip else [])


def test_an_adapter_of_the_tower_goes_on_the_vision_tower_of_two(tmp_path: Path) -> None:
    """The text tower has modules of the same names."""
    base = tiny.copied(tiny.hf_clip().state_dict())
    trained(tiny.hf_vision(), tmp_path, **QV)
    found = bound(base, tmp_path)
    changed = [name for name in base if not torch.equal(found[name], base[name])]
    assert len(changed) == 4
    assert all(name.startswith("vision_model.") for name in changed)


def test_a_new_head_is_the_task_s_own(tmp_path: Path) -> None:
    """A head that the pretrained model lacks is noted, and stays out."""
    from transformers import CLIPConfig, CLIPForImageClassification

    vision = tiny.VISION | {"image_size": 8, "patch_size": 4}
    with tiny.seeded():
        model = CLIPForImageClassification(CLIPConfig(vision_config=vision, text_config=tiny.TEXT, projection_dim=8))
    trained(model, tmp_path, **QV, modules_to_save=["classifier"])
    (note,) = fold_note(tiny.hf_vision().state_dict(), tmp_path)
    assert note.startswith("2 tensors of the adapter have no place in the pretrained model, first `classifier.")


def fold_note(base: Mapping[str, Tensor], folder: Path) -> tuple[str, ...]:
    return ContinualMerger(base, Add()).fold(folder, "task1").notes


def test_the_individual_row_scores_an_adapter_whole(tmp_path: Path) -> None:
    """All of a tower's tensors, not only those that are merged; put on the pretrained weights."""
    tower = tiny.hf_vision()
    wrapped = trained(tiny.hf_vision(), tmp_path, **QV, bias="all", modules_to_save=["post_layernorm"])
    found = expert_weights(tower, tmp_path)
    expected = {name: tensor for name, tensor in unloaded(wrapped).items() if tensor.is_floating_point()}
    assert sorted(found) == sorted(expected)
    assert same(found, expected, tower.state_dict()) == 4 + 2 * 8 + 3


@pytest.mark.parametrize("prefix", ["", "module."])
def test_an_adapter_crosses_layouts(prefix: str, tmp_path: Path) -> None:
    """Trained on a model of transformers, put on open_clip's fused projections."""
    base = {prefix + name: tensor.clone() for name, tensor in tiny.open_clip_model().state_dict().items()}
    trained(tiny.hf_vision(), tmp_path, target_modules=["q_proj", "v_proj", "fc1"])
    factors = load_file(tmp_path / "adapter_model.safetensors")
    found = bound(base, tmp_path)
    name = f"{prefix}visual.transformer.resblocks.1.attn.in_proj_weight"
    expected = base[name].clone()
    for start, part in ((0, "q_proj"), (16, "v_proj")):
        key = f"base_model.model.encoder.layers.1.self_attn.{part}.lora_"
        expected[start : start + 8] += 3 * factors[f"{key}B.weight"] @ factors[f"{key}A.weight"]
    torch.testing.assert_close(found[name], expected)
    assert torch.equal(found[name][8:16], base[name][8:16])
    assert sum(not torch.equal(found[name], base[name]) for name in base) == 4
    assert ContinualMerger(base, Add()).fold(tmp_path, "task1").notes == ()


def test_biases_and_norms_cross_layouts(tmp_path: Path) -> None:
    """As the dense model that peft makes does."""
    base = {name: tensor.clone() for name, tensor in tiny.open_clip_model().state_dict().items()}
    settings = QV | {"bias": "all", "modules_to_save": ["layer_norm1"]}
    wrapped = trained(tiny.hf_vision(), tmp_path, **settings)
    found, dense = bound(base, tmp_path), unloaded(wrapped)
    assert found.notes == ()
    start = "visual.transformer.resblocks.1"
    for ours, theirs in (("mlp.c_proj.bias", "mlp.fc2.bias"), ("ln_1.weight", "layer_norm1.weight")):
        assert torch.equal(found[f"{start}.{ours}"], dense[f"encoder.layers.1.{theirs}"])
    parts = [dense[f"encoder.layers.1.self_attn.{part}_proj.bias"] for part in "qkv"]
    assert torch.equal(found[f"{start}.attn.in_proj_bias"], torch.cat(parts))


def test_factors_that_belong_nowhere_are_refused(adapter: Path) -> None:
    """All of them, or one of many."""
    one = "base_model.model.encoder.layers.1.self_attn.q_proj"
    moved = rewritten(adapter, lambda tensors: tiny.renamed(tensors, one, "base_model.model.encoder.layers.9.q_proj"))
    assert "lacks 1 of 4 tensors" in refusal(moved)
    rewritten(adapter, lambda tensors: tiny.renamed(tensors, "base_model.model.", "base_model.wrong."))
    assert "belongs to another model" in refusal(adapter) or "has no place" in refusal(adapter)


def test_an_adapter_that_was_never_trained_is_refused(tmp_path: Path) -> None:
    """A product of zeros, as peft starts one."""
    from peft import LoraConfig, get_peft_model

    get_peft_model(tiny.hf_vision(), LoraConfig(**QV)).save_pretrained(tmp_path)
    assert "products are all zero" in refusal(tmp_path)


def test_an_adapter_that_was_never_trained_is_refused_after_a_check_of_headers_too(tmp_path: Path) -> None:
    """From the command line a model is looked at before it is folded, without its values."""
    from peft import LoraConfig, get_peft_model

    get_peft_model(tiny.hf_vision(), LoraConfig(**QV)).save_pretrained(tmp_path)
    merger = ContinualMerger(tiny.hf_vision(), Add())
    checked = merger.check(tmp_path, "task", values=False)
    with pytest.raises(CheckpointError, match="products are all zero"):
        merger.fold(checked, "task")
    assert merger.tasks == []


def test_an_adapter_of_other_layers_is_refused(tmp_path: Path) -> None:
    """Nothing that is merged would change."""
    trained(tiny.hf_vision(), tmp_path, target_modules=["fc2"])
    assert re.search(r"changes none of the tensors to merge.*`encoder\.layers\.0\.mlp\.fc2\.weight`", refusal(tmp_path))
    merger = ContinualMerger(tiny.hf_vision().state_dict(), Add(), layers=["*.fc2.weight"])
    assert merger.fold(tmp_path, "task1").kept_fraction == 1


def test_an_adapter_of_another_size_is_refused_with_the_shapes(adapter: Path) -> None:
    message = refusal(adapter, tiny.tower(width=12))
    assert "(8, 2) and (2, 8)" in message
    assert "(12, 12)" in message


def test_nan_in_a_factor_is_named(adapter: Path) -> None:
    name = "base_model.model.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    rewritten(adapter, lambda tensors: tensors | {name: tensors[name] * float("nan")})
    assert "`encoder.layers.0.self_attn.q_proj.weight` has 64 NaN or Inf" in refusal(adapter)


def test_a_dry_check_reads_no_tensor(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.folder_of(tmp_path / "base", tiny.copied(tiny.hf_vision().state_dict()))
    parameters = list(tiny.only_weights(tiny.hf_vision().state_dict()))
    tiny.refuse_to_read(monkeypatch)
    found = fit(open_checkpoint(base), parameters, open_checkpoint(adapter), values=False)
    assert found.names == {name: name for name in parameters}
    with pytest.raises(AssertionError, match="a tensor was read"):
        fit(open_checkpoint(base), parameters, open_checkpoint(adapter))


def test_two_adapters_add_up_densely(tmp_path: Path) -> None:
    """No cross terms between the factors of one and those of the other."""
    base = tiny.copied(tiny.hf_vision().state_dict())
    merger = ContinualMerger(base, Add())
    expected = tiny.copied(base)
    for i, rank in enumerate((1, 3)):
        wrapped = trained(tiny.hf_vision(), tmp_path / str(i), **QV, r=rank)
        merger.fold(tmp_path / str(i), f"task{i}")
        expected = {name: expected[name] + tensor - base[name] for name, tensor in unloaded(wrapped).items()}
    for name, tensor in expected.items():
        torch.testing.assert_close(merger.merged[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_plain_model_needs_no_base() -> None:
    base = open_checkpoint(tiny.tower())
    incoming = open_checkpoint(tiny.tuned(tiny.tower(), 1))
    assert bind_adapter(base, tiny.only_weights(tiny.tower()), incoming) is incoming


@pytest.fixture(scope="module")
def zoo_adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An adapter of the zoo's CLIP with random factors, and the model that peft folds it into."""
    from transformers import CLIPModel

    folder = tmp_path_factory.mktemp("zoo")
    with tiny.seeded():
        model = CLIPModel.from_pretrained(Zoo().model, dtype=torch.float32)
    wrapped = trained(model, folder / "adapter", target_modules=["q_proj", "fc1"], r=4, lora_alpha=1)
    tiny.folder_of(folder / "dense", {name: tensor.contiguous() for name, tensor in unloaded(wrapped).items()})
    return folder / "adapter", folder / "dense"


def test_a_stream_of_adapters_is_a_stream_of_the_models_they_make(
    zoo_adapter: tuple[Path, Path],
    small_data: Callable[..., Any],
    make_trainer: Callable[..., L.Trainer],
) -> None:
    """Under Lightning: the merged tower, and the row of the experts on their own."""
    towers, rows = [], []
    for source in zoo_adapter:
        module, references = ContinualMergeModule(), ReferenceRows()
        merge = MergeCallback(Add(), experts={"mnist": str(source)})
        make_trainer(merge, references, max_epochs=1).fit(module, small_data(["mnist"]))
        towers.append(module.backbone.vision_model.state_dict())
        rows.append(references.rows)
        assert any(row.task_norm for row in merge.reports[0].layers)
    for name, tensor in towers[0].items():
        torch.testing.assert_close(tensor, towers[1][name], rtol=1e-5, atol=1e-6)
    assert rows[0]["individual"] == rows[1]["individual"]
    assert rows[0]["individual"] != rows[0]["pretrained"]


def test_the_check_of_a_stream_takes_adapters_and_says_what_differs(
    zoo_adapter: tuple[Path, Path], small_data: Callable[..., Any], tmp_path: Path
) -> None:
    """The pre-flight of a whole stream: facts with notes, problems with the remedy."""
    shutil.copytree(zoo_adapter[0], tmp_path / "other")
    configured(tmp_path / "other", base_model_name_or_path="owner/other-clip")
    shutil.copytree(zoo_adapter[0], tmp_path / "bad")
    configured(tmp_path / "bad", peft_type="IA3")
    experts = {"weather": str(zoo_adapter[0]), "mnist": str(tmp_path / "other"), "font_category": str(tmp_path / "bad")}
    merge = MergeCallback(experts=experts)
    facts, problems = check_stream(ContinualMergeModule(), small_data(list(experts)), merge, tmp_path / "out")
    assert [fact for fact in facts if "weather':" in fact] == []
    assert any(re.search(r"task 'mnist': .*trained on `owner/other-clip`", fact) for fact in facts)
    assert len(problems) == 1
    assert re.search(r"task 'font_category': .*type IA3.*merge_and_unload", problems[0])
