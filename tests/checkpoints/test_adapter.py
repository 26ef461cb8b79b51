"""An adapter's file: factors, settings and notes on its base."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny import Add
from tiny_adapters import QV, bound, configured, refusal, rewritten, trained

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]  # of peft


def test_an_adapter_file_given_by_its_path_finds_its_settings(tmp_path: Path) -> None:
    base = tiny.copied(tiny.hf_vision().state_dict())
    trained(tiny.hf_vision(), tmp_path, **QV)
    by_file = bound(base, tmp_path / "adapter_model.safetensors")
    expected = dict(bound(base, tmp_path))
    tiny.assert_same(dict(by_file), expected)
    torch.save(load_file(tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    tiny.assert_same(dict(bound(base, tmp_path)), expected)


@pytest.mark.parametrize("where", ["/models/other-clip", "owner/other-clip"])
def test_an_adapter_of_another_base_is_noted(where: str, tmp_path: Path) -> None:
    folder = tiny.folder_of(tmp_path / "clip-base", tiny.copied(tiny.hf_vision().state_dict()))
    trained(tiny.hf_vision(), tmp_path / "adapter", **QV)
    configured(tmp_path / "adapter", base_model_name_or_path=where)
    (note,) = ContinualMerger(folder, Add()).fold(tmp_path / "adapter", "task1").notes
    assert f"`{where}`" in note
    assert f"`{folder}`" in note


@pytest.mark.parametrize("where", ["{base}", "openai/clip-base", "/elsewhere/clip-base/", None])
def test_an_adapter_of_this_base_is_not_noted(where: str | None, tmp_path: Path) -> None:
    """By path, or by the name that a hub id and a local copy share."""
    folder = tiny.folder_of(tmp_path / "clip-base", tiny.copied(tiny.hf_vision().state_dict()))
    trained(tiny.hf_vision(), tmp_path / "adapter", **QV)
    configured(tmp_path / "adapter", base_model_name_or_path=where and where.format(base=folder))
    assert ContinualMerger(folder, Add()).fold(tmp_path / "adapter", "task1").notes == ()


def test_the_hub_cache_s_path_names_the_model_too(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--openai--clip-base" / "snapshots" / ("1" * 40)
    folder = tiny.folder_of(snapshot, tiny.copied(tiny.hf_vision().state_dict()))
    trained(tiny.hf_vision(), tmp_path / "adapter", **QV)
    configured(tmp_path / "adapter", base_model_name_or_path="openai/clip-base")
    assert ContinualMerger(folder, Add()).fold(tmp_path / "adapter", "task1").notes == ()


def test_an_adapter_cut_in_half_is_refused(adapter: Path) -> None:
    rewritten(
        adapter,
        lambda tensors: {name: tensor for name, tensor in tensors.items() if "1.self_attn.q_proj.lora_B" not in name},
    )
    assert "`encoder.layers.1.self_attn.q_proj` has only" in refusal(adapter)


def test_settings_of_another_adapter_are_refused(adapter: Path) -> None:
    """The scale would be wrong by a constant factor."""
    assert "has rank 2, adapter_config.json says 8" in refusal(configured(adapter, r=8))


def test_trained_tokens_and_embeddings_under_dora_are_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    trained(tiny.hf_gpt2(), tmp_path / "a", **settings, trainable_token_indices={"wte": [1]})
    assert "trainable_token_indices" in refusal(tmp_path / "a", tiny.hf_gpt2().state_dict())
    configured(tmp_path / "a", trainable_token_indices=None)
    assert "token_adapter" in refusal(tmp_path / "a", tiny.hf_gpt2().state_dict())
    trained(tiny.hf_gpt2(), tmp_path / "b", target_modules=["wpe", "c_attn"], fan_in_fan_out=True, use_dora=True)
    assert "`transformer.wpe` is an embedding under DoRA" in refusal(tmp_path / "b", tiny.hf_gpt2().state_dict())


def test_an_adapter_without_weights_or_beside_a_model_is_refused(adapter: Path) -> None:
    save_file(tiny.tower(), adapter / "model.safetensors")
    assert "holds a model (model.safetensors) and an adapter" in refusal(adapter)
    (adapter / "model.safetensors").unlink()
    (adapter / "adapter_model.safetensors").unlink()
    assert "holds no adapter weights" in refusal(adapter)


def test_an_adapter_is_no_pretrained_model(adapter: Path) -> None:
    with pytest.raises(CheckpointError, match="is an adapter; `pretrained` needs the whole model"):
        ContinualMerger(adapter)


def test_a_product_that_a_later_peft_may_add_once_is_refused(tmp_path: Path) -> None:
    """Versions up to 0.21 add it twice, in training as in merging; of later ones that is not known."""
    trained(tiny.open_clip_model(), tmp_path, target_modules=["attn"])
    message = refusal(configured(tmp_path, peft_version="0.22.0"), tiny.open_clip_model().state_dict())
    assert "whether peft 0.22.0 adds `" in message
    assert "attn.out_proj` once or twice" in message


def test_an_adapter_without_peft_s_prefix_is_read_all_the_same(adapter: Path) -> None:
    """Never silently ignored."""
    base = tiny.hf_vision().state_dict()
    expected = dict(bound(base, adapter))
    rewritten(adapter, lambda tensors: tiny.renamed(tensors, "base_model.model.", ""))
    tiny.assert_same(dict(bound(base, adapter)), expected)
