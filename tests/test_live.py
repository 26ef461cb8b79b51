"""Merging what is trained in one module, in plain PyTorch: weights in and out, adapters, kinds of modules."""

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import nn

from safemerge_pl import LiveMerger
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import TaskArithmetic
from safemerge_pl.output import saving

MODELS = [tiny.timm_vit, tiny.hf_vision, tiny.hf_clip, tiny.hf_t5, tiny.hf_llama, tiny.hf_gpt2, tiny.open_clip_model]


def train(module: nn.Module, seed: int) -> None:
    """A seeded step on every trainable parameter and buffer of the module."""
    with torch.no_grad():
        for number, (_, tensor) in enumerate(module.named_parameters()):
            if tensor.requires_grad:
                tensor.add_(0.01 * tiny.randn(*tensor.shape, seed=1000 * seed + number))


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_a_plain_loop_equals_folding_checkpoints(build: Any, tmp_path: Path) -> None:
    """With fused, transposed and tied tensors; the rest returns to its pretrained values."""
    module = build()
    theta0, objects = tiny.copied(module.state_dict()), [id(p) for p in module.parameters()]
    merger, other = LiveMerger(module, tiny.fast_method()), ContinualMerger(copy.deepcopy(module), tiny.fast_method())
    for number, task in enumerate(("a", "b")):
        merger.restart()
        tiny.assert_same(tiny.copied(module.state_dict()), theta0)
        train(module, number)
        other.fold(tiny.copied(module.state_dict()), task)
        merger.fold_trained(task)
        tiny.assert_same(tiny.copied(module.state_dict()), other.merged)
    assert merger.fingerprint() == other.fingerprint()
    assert objects == [id(p) for p in module.parameters()]
    merger.save(tmp_path / "out")
    again = LiveMerger.load(tmp_path / "out", build())
    again.apply_merged()
    tiny.assert_same(tiny.copied(again.module.state_dict()), other.merged)


def trained_once(module: nn.Module, **options: Any) -> LiveMerger:
    """A merger that has folded one task of a module."""
    merger = LiveMerger(module, tiny.fast_method(), **options)
    train(module, 1)
    merger.fold_trained("a")
    return merger


def test_a_merge_is_continued_in_a_module_whose_pretrained_weights_are_in_a_file(tmp_path: Path) -> None:
    """The module of the next day holds whatever it was trained to; what it started from lies in a folder."""
    base = tiny.folder_of(tmp_path / "base", tiny.copied(tiny.hf_vision().state_dict()))
    merger = trained_once(tiny.hf_vision(), pretrained=base)
    merger.save(tmp_path / "out")
    module = tiny.hf_vision()
    train(module, 9)
    again = LiveMerger.load(tmp_path / "out", module, pretrained=str(base))
    assert again.tasks == ["a"]
    for each in (merger, again):
        each.restart()
        train(each.module, 2)
        each.fold_trained("b")
    tiny.assert_same(tiny.copied(again.module.state_dict()), tiny.copied(merger.module.state_dict()))
    assert again.save(tmp_path / "out") == tmp_path / "out"


def test_a_model_that_was_trained_elsewhere_is_folded_into_the_module() -> None:
    """The module never holds other weights than the merger."""
    module = tiny.hf_vision()
    incoming = tiny.tuned(tiny.copied(module.state_dict()), 2)
    merger = trained_once(module)
    merger.fold(incoming, "b")
    tiny.assert_same(tiny.copied(module.state_dict()), merger.merged)
    assert merger.tasks == ["a", "b"]
    before = tiny.copied(module.state_dict())
    with pytest.raises(CheckpointError, match="already merged"):
        merger.fold(incoming, "b")
    tiny.assert_same(tiny.copied(module.state_dict()), before)


def test_the_pretrained_model_stays_as_it_is_while_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files beside the weights come from a folder of their own, of which the pretrained model knows nothing."""
    merger = trained_once(tiny.hf_vision())
    held = []
    real = saving.copy_side_files

    def watch(folder: Path, *args: Any, **options: Any) -> None:
        held.append((merger.pretrained.folder, (folder / "config.json").exists()))
        real(folder, *args, **options)

    monkeypatch.setattr(saving, "copy_side_files", watch)
    merger.save(tmp_path / "out")
    assert held == [(None, True)]
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("build", [tiny.hf_gpt2, tiny.hf_t5], ids=["gpt2", "t5"])
def test_tied_tensors_are_saved_merged_under_all_their_names(build: Any, tmp_path: Path) -> None:
    """The files beside the weights are those of the module's own configuration."""
    module = build()
    merger = LiveMerger(module, TaskArithmetic())
    train(module, 1)
    merger.fold_trained("a")
    tiny.assert_same(load_file(merger.save(tmp_path / "out") / "model.safetensors"), merger.merged)


def test_a_saved_transformers_model_loads(tmp_path: Path) -> None:
    from transformers import CLIPVisionModel

    module = tiny.hf_vision_model()
    merger = LiveMerger(module, tiny.fast_method())
    train(module, 1)
    merger.fold_trained("a")
    merger.save(tmp_path / "out")
    loaded, info = CLIPVisionModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    tiny.assert_same(tiny.copied(loaded.state_dict()), tiny.copied(module.state_dict()))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("build", [tiny.timm_vit, tiny.hf_gpt2], ids=["timm", "gpt2"])
def test_adapters_are_folded_as_dense_updates_and_start_anew(build: Any) -> None:
    """LoRA (also on transposed weights) gives the merge of the dense model that it stands for."""
    peft = pytest.importorskip("peft")
    plain = build()
    theta0 = tiny.copied(plain.state_dict())
    targets = ["qkv", "fc1"] if build is tiny.timm_vit else ["c_attn", "c_fc"]
    config = peft.LoraConfig(target_modules=targets, r=2, lora_alpha=6, fan_in_fan_out=build is tiny.hf_gpt2)
    module = peft.get_peft_model(plain, config)
    merger, other = LiveMerger(module, tiny.fast_method()), ContinualMerger(build(), tiny.fast_method())
    start = {name: tensor for name, tensor in tiny.copied(module.state_dict()).items() if "lora_" in name}
    for number, task in enumerate(("a", "b")):
        merger.restart()
        train(module, number)
        dense = tiny.copied(copy.deepcopy(module).merge_and_unload().state_dict())
        other.fold(dense, task)
        merger.fold_trained(task)
        merged = tiny.copied(copy.deepcopy(module).merge_and_unload().state_dict())
        for name, tensor in other.merged.items():
            torch.testing.assert_close(merged[name], tensor, rtol=0, atol=2e-6)
        held = module.state_dict()
        assert all(torch.equal(held[name], tensor) for name, tensor in start.items())
    merger.restart()
    tiny.assert_same(tiny.copied(copy.deepcopy(module).merge_and_unload().state_dict()), theta0)
    assert not any("lora" in name or "base_layer" in name for name in merger.merged)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "uses DoRA or another variant"),
        ({"init_lora_weights": False}, "adapters are not zero at the start"),
        ({"lora_bias": True}, "trains a bias in its adapter"),
    ],
)
def test_adapters_without_a_dense_equivalent_are_refused(settings: dict[str, Any], message: str) -> None:
    peft = pytest.importorskip("peft")
    module = peft.get_peft_model(tiny.timm_vit(), peft.LoraConfig(target_modules=["qkv"], r=2, **settings))
    with pytest.raises(CheckpointError, match=message):
        LiveMerger(module)


def test_adapters_on_whole_attentions_are_refused() -> None:
    """What peft does there is no plain sum (huggingface/peft#3774)."""
    peft = pytest.importorskip("peft")
    module = peft.get_peft_model(tiny.open_clip_model(), peft.LoraConfig(target_modules=["attn"], r=2))
    with pytest.raises(CheckpointError, match=r"is on a whole nn\.MultiheadAttention"):
        LiveMerger(module)


def test_other_tuners_and_merged_adapters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    module = peft.get_peft_model(tiny.timm_vit(), peft.LoHaConfig(target_modules=["fc1"], r=2))
    with pytest.raises(CheckpointError, match="of which no dense equivalent is known"):
        LiveMerger(module)
    module = peft.get_peft_model(tiny.timm_vit(), peft.LoraConfig(target_modules=["fc1"], r=2))
    module.merge_adapter()
    with pytest.raises(CheckpointError, match="merged into its weight at the moment"):
        LiveMerger(module)


def test_training_of_an_adapter_that_is_not_merged_is_not_lost_in_silence() -> None:
    peft = pytest.importorskip("peft")
    module = peft.get_peft_model(tiny.timm_vit(), peft.LoraConfig(target_modules=["fc1", "fc2"], r=2))
    merger = LiveMerger(module, tiny.fast_method())
    train(module, 1)
    with pytest.warns(UserWarning, match=r"2 trained LoRA adapters are on layers that are not merged.*fc2"):
        merger.fold_trained("a")


def test_methods_that_merge_everything_leave_adapters_alone() -> None:
    peft = pytest.importorskip("peft")
    module = peft.get_peft_model(tiny.timm_vit(), peft.LoraConfig(target_modules=["fc1"], r=2))
    merger = LiveMerger(module, TaskArithmetic())
    assert not any("lora" in name for name in merger.merged_parameters())
    assert "pos_embed" in merger.merged_parameters()


def test_compiled_modules_and_wrappers(tmp_path: Path) -> None:
    """Names with ``_orig_mod.`` are the same layers."""
    compiled = torch.compile(tiny.timm_vit(), backend="eager")
    merger = LiveMerger(compiled, tiny.fast_method())  # type: ignore[arg-type]
    plain = LiveMerger(tiny.timm_vit(), tiny.fast_method())
    for each in (merger, plain):
        train(each.module, 1)
        each.fold_trained("a")
    assert merger.fingerprint() == plain.fingerprint()


def test_pretrained_weights_from_elsewhere(tmp_path: Path) -> None:
    trained = tiny.hf_vision()
    theta0 = tiny.copied(trained.state_dict())
    train(trained, 1)
    held = tiny.copied(trained.state_dict())
    base = tiny.folder_of(
        tmp_path / "base", {f"vision_model.{n}": t.half() for n, t in theta0.items() if "ids" not in n}
    )
    merger = LiveMerger(trained, tiny.fast_method(), pretrained=base)
    tiny.assert_same(tiny.copied(trained.state_dict()), held)  # nothing is written before it is asked for
    merger.restart()
    name = "embeddings.patch_embedding.weight"
    assert torch.equal(trained.state_dict()[name], theta0[name].half().float())
    with pytest.raises(CheckpointError, match="lacks"):
        LiveMerger(tiny.timm_vit(), pretrained=base)


def test_a_state_continues_to_the_same_bits() -> None:
    """Also with adapters whose random start differs in the new process."""
    peft = pytest.importorskip("peft")

    def build(seed: int) -> LiveMerger:
        torch.manual_seed(seed)
        module = peft.get_peft_model(tiny.timm_vit(), peft.LoraConfig(target_modules=["qkv", "fc1"], r=2))
        return LiveMerger(module, tiny.fast_method())

    straight, stopped, resumed = build(1), build(1), build(2)
    for merger in (straight, stopped):
        train(merger.module, 1)
        merger.fold_trained("a")
    resumed.load_training_state(stopped.training_state())
    for merger in (straight, resumed):
        merger.restart()
        train(merger.module, 2)
        merger.fold_trained("b")
    tiny.assert_same(tiny.copied(resumed.module.state_dict()), tiny.copied(straight.module.state_dict()))
    assert resumed.fingerprint() == straight.fingerprint()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_keep_a_float32_master(dtype: torch.dtype) -> None:
    """The module holds the merge in its own dtype, the merger in float32."""
    module = tiny.timm_vit().to(dtype)
    merger = LiveMerger(module, tiny.fast_method())
    train(module, 1)
    merger.fold_trained("a")
    held = module.state_dict()
    for name, tensor in merger.merged_parameters().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(held[name], tensor.to(dtype))
