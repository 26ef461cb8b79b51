"""LoRA adapters of peft inside a module: what they add to the weights, and the names of the model without them."""

import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from safemerge_pl.checkpoints.open import CheckpointError

__all__ = ["adapter_deltas", "adapter_names", "plain_name"]


def plain_name(name: str) -> str:
    """Give the name that a tensor has in the model that peft wrapped.

    Example:
        >>> plain_name("base_model.model.blocks.0.attn.qkv.base_layer.weight"), plain_name("blocks.0.attn.qkv.weight")
        ('blocks.0.attn.qkv.weight', 'blocks.0.attn.qkv.weight')
    """
    return re.sub(r"(?:^|(?<=\.))base_model\.model\.|(?<=\.)base_layer\.", "", name)


def adapter_names(module: nn.Module) -> set[str]:
    """List the plain names of all tensors that belong to adapters."""
    return {
        plain_name(f"{path}.{name}" if path else name)
        for path, layer in _adapted(module)
        for name in layer.state_dict()
        if not name.startswith("base_layer.")
    }


@torch.no_grad()
def adapter_deltas(module: nn.Module) -> dict[str, Tensor]:
    r"""Compute what the active adapters add to each adapted weight, :math:`s B A`, by the weight's plain name.

    Raises:
        CheckpointError: for adapters that are no plain LoRA, or are merged into their weights at the moment.
    """
    deltas: dict[str, Tensor] = {}
    for path, layer in _adapted(module):
        active = [name for name in layer.active_adapters if name in (*layer.lora_A, *layer.lora_embedding_A)]
        if active:
            name = plain_name(f"{path}.base_layer.weight")
            parts = [layer.get_delta_weight(adapter) for adapter in active]
            deltas[name] = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
    return deltas


def _adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Give path and layer of every adapter; refuse anything but plain LoRA."""
    if "peft" not in sys.modules:  # nobody can have made one
        return
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, layer in module.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        reason = ""
        if not isinstance(layer, LoraLayer) or not hasattr(layer, "get_delta_weight"):
            reason = f"is a {type(layer).__name__}, of which no dense equivalent is known"
        elif hasattr(layer, "parameter_name"):
            reason = f"is on the parameter `{layer.parameter_name}` itself (`target_parameters`), not on a linear layer"
        elif isinstance(layer.get_base_layer(), nn.MultiheadAttention):
            reason = "is on a whole nn.MultiheadAttention, where peft adds one product twice (huggingface/peft#3774)"
        elif any(layer.use_dora.values()) or getattr(layer, "lora_variant", None):
            reason = "uses DoRA or another variant of LoRA, which is no sum of weight and update"
        elif any(getattr(layer, "lora_bias", {}).values()):
            reason = "trains a bias in its adapter"
        elif layer.merged:
            reason = "is merged into its weight at the moment (call unmerge_adapter)"
        if reason:
            raise CheckpointError(f"adapter `{path}` {reason}; use plain LoRA, or train the weights themselves.")
        yield path, layer
