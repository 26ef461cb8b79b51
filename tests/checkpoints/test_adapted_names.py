"""Adapters that name modules as in memory, where the pretrained folder's file has other names."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import Tensors, notes_but_head
from tiny_adapters import bound, rewritten, trained
from tiny_families import DECODER, IMAGE, SIZES, hf
from torch import nn

from safemerge_pl.architectures.memory_names import common_name
from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, SafeMerge, TaskArithmetic
from safemerge_pl.methods.base import MergeMethod

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]  # of peft

QV = {"target_modules": ["q_proj", "v_proj", "query", "value"]}  # names of both today and early transformers 5
TEXT = SIZES | {"vocab_size": 32, "num_key_value_heads": 2}
ROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}}
QWEN_IMAGE = {"depth": 2, "hidden_size": 16, "num_heads": 4, "patch_size": 8}
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {  # and what is saved beside the factors
    "ViT": (hf("ViTForImageClassification", **IMAGE), "classifier"),
    "DeiT": (hf("DeiTForImageClassification", **IMAGE), "classifier"),
    "BEiT": (hf("BeitForImageClassification", **IMAGE, use_relative_position_bias=True), "classifier"),
    "BEiT, shared positions": (
        hf("BeitForImageClassification", **IMAGE, use_shared_relative_position_bias=True),
        "classifier",
    ),
    "DINOv2": (hf("Dinov2ForImageClassification", **IMAGE, mlp_ratio=2), "classifier"),
    "DINOv2, gated": (hf("Dinov2ForImageClassification", **IMAGE, use_swiglu_ffn=True), "classifier"),
    "DINOv2 with registers": (hf("Dinov2WithRegistersForImageClassification", **IMAGE, mlp_ratio=2), "classifier"),
    "Swin": (
        hf(
            "SwinForImageClassification",
            **{"image_size": 16, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2]},
            window_size=2,
        ),
        "classifier",
    ),
    "LLaVA": (
        hf(
            "LlavaForConditionalGeneration",
            vision_config=IMAGE | {"model_type": "clip_vision_model"},
            text_config=TEXT | {"model_type": "llama"},
        ),
        "lm_head",
    ),
    "Gemma 3": (
        hf("Gemma3ForConditionalGeneration", vision_config=IMAGE, text_config=TEXT | {"head_dim": 4}),
        "norm",
    ),
    "Qwen2-VL": (
        hf(
            "Qwen2VLForConditionalGeneration",
            text_config=TEXT | ROPE,
            vision_config=QWEN_IMAGE | {"embed_dim": 16},
        ),
        "lm_head",
    ),
    "Qwen2.5-VL": (
        hf(
            "Qwen2_5_VLForConditionalGeneration",
            text_config=TEXT | ROPE,
            vision_config=QWEN_IMAGE | {"intermediate_size": 24, "out_hidden_size": 16},
        ),
        "lm_head",
    ),
}
ALL = "all-linear"
SETTINGS: dict[str, Callable[[str], dict[str, Any]]] = {
    "all linear layers": lambda _: {"target_modules": ALL},
    "q and v and a saved module": lambda saved: QV | {"modules_to_save": [saved]},
    "all biases": lambda _: QV | {"bias": "all"},
    "all biases and a saved module": lambda saved: QV | {"bias": "all", "modules_to_save": [saved]},
    "biases of the adapted layers": lambda _: {"target_modules": ALL, "bias": "lora_only"},
    "DoRA": lambda _: {"target_modules": ALL, "use_dora": True},
}


def folders(model: str, settings: dict[str, Any], place: Path) -> tuple[Path, Path, Path]:
    """The pretrained model, an adapter of it, and the model that peft makes of both."""
    fresh = MODELS[model][0]()
    fresh.save_pretrained(place / "base")  # type: ignore[operator]
    wrapped = trained(fresh, place / "adapter", **settings)
    wrapped.merge_and_unload().save_pretrained(place / "dense")  # type: ignore[operator]
    return place / "base", place / "adapter", place / "dense"


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_an_adapter_of_the_module_in_memory_goes_on_the_file(model: str, settings: str, tmp_path: Path) -> None:
    """Every tensor of the file is what peft makes of it, and is unchanged where peft changes nothing."""
    base, adapter, dense = folders(model, SETTINGS[settings](MODELS[model][1]), tmp_path)
    pretrained, expected = open_checkpoint(base), open_checkpoint(dense)
    found = bound(pretrained, adapter)
    assert found.notes == ()
    changed = 0
    for name in pretrained:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)
        same = torch.equal(expected[name], pretrained[name])
        assert not same or torch.equal(found[name], pretrained[name])
        assert found.dtype(name) == found[name].dtype
        changed += not same
    assert changed > 2


@pytest.mark.parametrize("model", ["ViT", "DINOv2, gated"])
def test_biases_of_the_factors_go_on_the_file(model: str, tmp_path: Path) -> None:
    """Some into a few rows of a fused bias; peft takes them only where every adapted layer has a bias."""
    base, adapter, dense = folders(model, {"target_modules": ALL, "lora_bias": True}, tmp_path)
    pretrained, expected = open_checkpoint(base), open_checkpoint(dense)
    found = bound(pretrained, adapter)
    for name in pretrained:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)
        if re.search(r"encoder\.layer\.\d+\.(?!norm|layernorm).*\.bias$", name):
            assert not torch.equal(found[name], pretrained[name]), name


METHODS: dict[str, Callable[[], MergeMethod]] = {
    "SafeMerge": lambda: SafeMerge(scoring_rank=4, recovery_rank=3, task_rank=2, num_steps=3),
    "TaskArithmetic": TaskArithmetic,
    "OPCM": OPCM,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("settings", ["all linear layers", "q and v and a saved module", "all biases"])
@pytest.mark.parametrize("model", ["ViT", "BEiT", "DINOv2, gated", "Swin", "LLaVA", "Qwen2-VL"])
def test_folding_it_is_folding_what_peft_makes_of_it(model: str, settings: str, method: str, tmp_path: Path) -> None:
    """Also under methods that merge every parameter."""
    base, adapter, dense = folders(model, SETTINGS[settings](MODELS[model][1]), tmp_path)
    right, mine = (ContinualMerger(base, METHODS[method]()) for _ in range(2))
    right.fold(dense, "task")
    report = mine.fold(adapter, "task")
    assert notes_but_head(report) == ()
    for name, tensor in right.merged.items():
        torch.testing.assert_close(mine.merged[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_head_is_found_where_only_the_tower_is_adapted(tmp_path: Path) -> None:
    """The tower's names differ by one prefix, the head's by another."""
    settings = {"target_modules": r".*vision_tower.*\.q_proj", "modules_to_save": ["lm_head"]}
    base, adapter, dense = folders("LLaVA", settings, tmp_path)
    found, expected = bound(open_checkpoint(base), adapter), open_checkpoint(dense)
    assert found.notes == ()
    name = "language_model.lm_head.weight"
    assert torch.equal(found[name], expected[name])
    assert not torch.equal(found[name], open_checkpoint(base)[name])


@pytest.mark.parametrize("settings", ["all linear layers", "all biases"])
@pytest.mark.parametrize("model", ["ViT", "DINOv2", "Swin", "LLaVA", "Qwen2-VL"])
def test_an_older_adapter_goes_on_the_module_in_memory(model: str, settings: str, tmp_path: Path) -> None:
    """Trained before the names in memory were other ones, and folded in a loop on the module; DDP has its prefix."""
    base, adapter, _ = folders(model, SETTINGS[settings](MODELS[model][1]), tmp_path)
    memory = MODELS[model][0]().state_dict()
    spelt = {common_name(name): name for name in open_checkpoint(base)}
    modules = {name.rpartition(".")[0]: spelt.get(common_name(name), name).rpartition(".")[0] for name in memory}

    def older(tensors: Tensors) -> Tensors:
        renamed = {}
        for key, tensor in tensors.items():
            module = max((name for name in modules if f".{name}." in key), key=len)
            renamed[key.replace(f".{module}.", f".{modules[module]}.")] = tensor
        return renamed

    expected = tiny.copied(bound(memory, adapter))  # the file is written anew
    found = bound({f"module.{name}": tensor for name, tensor in memory.items()}, rewritten(adapter, older))
    for name in memory:
        assert torch.equal(found[f"module.{name}"], expected[name]), name
    assert any(not torch.equal(expected[name], memory[name]) for name in memory)


def test_an_adapter_of_the_tower_goes_on_the_classifier(tmp_path: Path) -> None:
    """Whose names have a prefix beside."""
    hf("ViTForImageClassification", **IMAGE)().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    settings = {"target_modules": r".*layers?\.\d.*(_proj|fc1|fc2|query|key|value|dense)", "bias": "lora_only"}
    trained(hf("ViTModel", **IMAGE)(), tmp_path / "adapter", **settings)
    pretrained = open_checkpoint(tmp_path / "base")
    found = bound(pretrained, tmp_path / "adapter")
    assert found.notes == ()
    changed = [name for name in pretrained if not torch.equal(found[name], pretrained[name])]
    assert len(changed) == 2 * 6 * 2


def test_the_router_of_a_mixture_is_found(tmp_path: Path) -> None:
    """Mixtral's block has another name in memory."""
    model = hf("MixtralForCausalLM", **DECODER, num_local_experts=2)()
    model.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    wrapped = trained(model, tmp_path / "adapter", **QV, modules_to_save=["gate"])
    wrapped.merge_and_unload().save_pretrained(tmp_path / "dense")  # type: ignore[operator]
    pretrained, expected = open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "dense")
    found = bound(pretrained, tmp_path / "adapter")
    assert found.notes == ()
    name = "model.layers.0.block_sparse_moe.gate.weight"
    assert torch.equal(found[name], expected[name])
    assert not torch.equal(found[name], pretrained[name])


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({"target_modules": ["q_proj", "query", "classifier"]}, "1 tensors of the adapter have no place"),
        (QV | {"modules_to_save": ["classifier"]}, "2 tensors of the adapter have no"),
        ({"target_modules": "all-linear", "task_type": "SEQ_CLS"}, "tensors of the adapter have no place"),
    ],
)
@pytest.mark.parametrize("method", [tiny.fast_method, OPCM])
def test_an_adapter_of_a_classifier_goes_on_the_model_without_its_head(
    settings: dict[str, Any], left_out: str, method: Any, tmp_path: Path
) -> None:
    """What is inside is merged as peft merges it, and the head that has no place is named."""
    model: Any = hf("ViTForImageClassification", **IMAGE)()
    model.base_model.save_pretrained(tmp_path / "base")
    wrapped: Any = trained(model, tmp_path / "adapter", **settings)
    merger = ContinualMerger(tmp_path / "base", method())
    (note,) = merger.fold(tmp_path / "adapter", "task1").notes
    assert left_out in note
    assert "first `classifier." in note
    wrapped.merge_and_unload().base_model.save_pretrained(tmp_path / "dense")
    expected = ContinualMerger(tmp_path / "base", method())
    expected.fold(tmp_path / "dense", "task1")
    for name, tensor in expected.merged.items():
        torch.testing.assert_close(merger.merged[name], tensor, rtol=0, atol=2e-5)


def test_an_adapter_of_nothing_but_a_head_says_that_the_base_has_none(tmp_path: Path) -> None:
    model: Any = hf("BertForSequenceClassification", **TEXT)()
    model.base_model.save_pretrained(tmp_path / "base")
    trained(model, tmp_path / "adapter", target_modules=["classifier"])
    with pytest.raises(CheckpointError, match=r"changes `classifier\.weight`, which .*base does not have.* head"):
        ContinualMerger(tmp_path / "base", OPCM()).fold(tmp_path / "adapter", "task1")


def test_factors_of_experts_that_are_fused_in_memory_are_refused(tmp_path: Path) -> None:
    """Peft puts them on the parameter; the folder says so in its settings."""
    import peft

    tiny.hf_mixtral().save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    peft.get_peft_model(tiny.hf_mixtral(), settings).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"`target_parameters`, a LoRA variant that is not read"):
        ContinualMerger(tmp_path / "base", tiny.fast_method()).fold(tmp_path / "adapter", "task1")
