"""A tiny Llama as transformers has it and as its makers write it, spelled out row by row."""

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from tiny import Tensors
from torch import Tensor

HEADS, KEY_HEADS, SIZE = 4, 2, 4
PARAMS: dict[str, Any] = {"dim": HEADS * SIZE, "n_heads": HEADS, "n_kv_heads": KEY_HEADS}
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers.": "layers.",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe": "feed_forward",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": HEADS * SIZE, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS}
    with tiny.seeded():
        return LlamaForCausalLM(LlamaConfig(**(sizes | heads | settings))).eval()


def plain(model: Any) -> Tensors:
    return tiny.copied(model.state_dict())


def interleave(tensor: Tensor, size: int = SIZE) -> Tensor:
    """Rows of a head as (first, middle, second, middle + 1, ...)."""
    order = [
        head * size + half * size // 2 + pair
        for head in range(len(tensor) // size)
        for pair in range(size // 2)
        for half in range(2)
    ]
    return tensor[order].contiguous()


def makers(tensors: Tensors) -> Tensors:
    """The makers' names and their order of rows."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        found[name] = interleave(tensor) if ".wq." in name or ".wk." in name else tensor.clone()
    return found


def fused(tensors: Tensors) -> Tensors:
    """Q, k and v in one matrix, as Phi-3 has them, in transformers' order."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(("k_proj.weight", "v_proj.weight"))}
    for name in [name for name in found if name.endswith("q_proj.weight")]:
        parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        del found[name]
        found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    return found


def mistral_folder(tensors: Tensors, folder: Path, params: dict[str, Any] | None = PARAMS) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "consolidated.safetensors")
    if params is not None:
        (folder / "params.json").write_text(json.dumps(params))
    return folder


def meta_folder(tensors: Tensors, folder: Path) -> Path:
    """One file of Meta's, of a model that was not cut into parts."""
    folder.mkdir()
    torch.save(tensors, folder / "consolidated.00.pth")
    (folder / "params.json").write_text(json.dumps(PARAMS))
    return folder
