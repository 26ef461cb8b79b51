"""Adapters of peft with random factors on tiny models, saved, changed and refused."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny import Add, Tensors
from torch import Tensor, nn

from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.checkpoints.adapted import BoundAdapter, bind
from safemerge_pl.checkpoints.adapter import Adapter
from safemerge_pl.merger import ContinualMerger

QV = {"target_modules": ["q_proj", "v_proj"]}


def trained(model: nn.Module, folder: Path, **settings: Any) -> nn.Module:
    """Put an adapter with random factors on a model, save it, and give the model with the adapter on."""
    from peft import LoraConfig, get_peft_model

    with tiny.seeded():
        wrapped: nn.Module = get_peft_model(model, LoraConfig(**({"r": 2, "lora_alpha": 6} | settings)))
    for i, (name, parameter) in enumerate(wrapped.named_parameters()):
        if parameter.requires_grad:
            noise = 0.1 * tiny.randn(*parameter.shape, seed=i).to(parameter.dtype)
            parameter.data = parameter.data + noise if "lora_" not in name or "magnitude" in name else noise
    wrapped.save_pretrained(folder)  # type: ignore[operator]
    return wrapped


def unloaded(wrapped: nn.Module) -> Tensors:
    """The tensors of the model that peft folds the adapter into."""
    return tiny.copied(wrapped.merge_and_unload().state_dict())  # type: ignore[operator]


def bound(base: Mapping[str, Tensor], folder: Path) -> BoundAdapter:
    adapter = open_checkpoint(folder)
    assert isinstance(adapter, Adapter)
    return bind(adapter, open_checkpoint(base))


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> int:
    """Every tensor within rounding of what peft gives; how many the adapter changed."""
    changed = 0
    for name, tensor in expected.items():
        if name not in base:  # what tied models list twice
            continue
        torch.testing.assert_close(found[name].to(tensor.dtype), tensor, rtol=1e-6, atol=1e-7, msg=name)
        changed += not torch.equal(tensor, base[name])
    return changed


def configured(folder: Path, **settings: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def rewritten(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(change(tensors), folder / "adapter_model.safetensors")
    return folder


def refusal(folder: Path, base: Mapping[str, Tensor] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        ContinualMerger(tiny.hf_vision().state_dict() if base is None else base, Add()).fold(folder, "task1")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)
