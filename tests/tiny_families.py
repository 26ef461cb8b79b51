"""Tiny models of some thirty families, saved by their own libraries, and what of a block is merged in each."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
from safetensors.torch import load_file
from torch import Tensor, nn

Shapes = dict[str, tuple[int, ...]]

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 32, "max_position_embeddings": 16}
DECODER = TEXT | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = SIZES | {"image_size": 16, "patch_size": 8}
SEQUENCE = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": 32,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

QKVO = {"q", "k", "v", "out"}
PLAIN, GATED = QKVO | {"up"}, QKVO | {"up", "gate"}
CROSS = {f"cross.{part}" for part in QKVO}


def hf(name: str, *, since: str = "5.0", **config: Any) -> Callable[[], nn.Module]:
    """A model of a transformers class, with random weights; older transformers than ``since`` have no such class."""

    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers", minversion=since)
        model_class = getattr(transformers, name)
        with tiny.seeded():
            return model_class(model_class.config_class(**config)).eval()

    return build


# class, configuration, parts merged in a block, what stays pretrained in a block
FAMILIES: dict[str, tuple[Callable[[], nn.Module], set[str], set[str]]] = {
    "BERT": (hf("BertModel", **TEXT), PLAIN, {"output.dense"}),
    "RoBERTa": (hf("RobertaForSequenceClassification", **TEXT), PLAIN, {"output.dense"}),
    "DeBERTa": (hf("DebertaV2Model", **TEXT), PLAIN, {"output.dense"}),
    "DistilBERT": (
        hf("DistilBertModel", dim=16, hidden_dim=24, n_layers=2, n_heads=4, vocab_size=32),
        PLAIN,
        {"ffn.lin2"},
    ),
    "ModernBERT": (
        hf("ModernBertModel", **TEXT, **dict.fromkeys(SPECIAL, 1), cls_token_id=1, sep_token_id=2),
        GATED,
        {"mlp.Wo"},
    ),
    "ViT": (hf("ViTForImageClassification", **IMAGE), PLAIN, {"output.dense", "mlp.fc2"}),
    "BEiT": (hf("BeitModel", **IMAGE), PLAIN, {"output.dense", "mlp.fc2"}),
    "DINOv2": (
        hf("Dinov2Model", **(IMAGE | {"mlp_ratio": 2})),
        PLAIN,
        {"mlp.fc2"},
    ),
    "DINOv2, gated": (
        hf("Dinov2Model", **(IMAGE | {"use_swiglu_ffn": True})),
        GATED,
        {"mlp.weights_out"},
    ),
    "DINOv3": (hf("DINOv3ViTModel", **IMAGE), PLAIN, {"mlp.down_proj"}),
    "SigLIP": (hf("SiglipVisionModel", **IMAGE), PLAIN, {"mlp.fc2"}),
    "BLIP": (hf("BlipVisionModel", **IMAGE), PLAIN, {"mlp.fc2"}),
    "wav2vec 2.0": (
        hf(
            "Wav2Vec2Model",
            **SIZES,
            conv_dim=(8, 8),
            conv_kernel=(3, 3),
            conv_stride=(2, 2),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        ),
        PLAIN,
        {"feed_forward.output_dense"},
    ),
    "OPT": (
        hf("OPTModel", hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=16),
        PLAIN,
        {"fc2"},
    ),
    "Mistral": (hf("MistralForCausalLM", **DECODER), GATED, {"mlp.down_proj"}),
    "Qwen3": (hf("Qwen3ForCausalLM", **DECODER), GATED, {"mlp.down_proj"}),
    "Gemma 2": (hf("Gemma2ForCausalLM", **DECODER), GATED, {"mlp.down_proj"}),
    "Phi": (hf("PhiForCausalLM", **DECODER), PLAIN, {"mlp.fc2"}),
    "Phi-3": (hf("Phi3ForCausalLM", **DECODER), GATED, {"mlp.down_proj"}),
    "StarCoder2": (hf("Starcoder2ForCausalLM", **DECODER), PLAIN, {"mlp.c_proj"}),
    "GPT-J": (
        hf("GPTJModel", n_embd=16, n_layer=2, n_head=4, vocab_size=32, rotary_dim=4, **SPECIAL),
        PLAIN,
        {"mlp.fc_out"},
    ),
    "GPT-Neo": (
        hf(
            "GPTNeoModel",
            hidden_size=16,
            num_layers=2,
            num_heads=4,
            vocab_size=32,
            attention_types=[[["global", "local"], 1]],
            **SPECIAL,
        ),
        PLAIN,
        {"mlp.c_proj"},
    ),
    "Whisper": (
        hf("WhisperModel", **SEQUENCE, **SPECIAL, max_source_positions=8, max_target_positions=8),
        PLAIN | CROSS,
        {"fc2"},
    ),
    "BART": (hf("BartModel", **SEQUENCE, **SPECIAL, max_position_embeddings=16), PLAIN | CROSS, {"fc2"}),
    "Mixtral": (
        hf("MixtralForCausalLM", **DECODER, num_local_experts=2),
        QKVO | {f"expert{e}.{part}" for e in (0, 1) for part in ("gate", "up")},
        {"block_sparse_moe.gate", "block_sparse_moe.experts.0.w2", "block_sparse_moe.experts.1.w2"},
    ),
    "Qwen2-MoE": (
        hf(
            "Qwen2MoeForCausalLM",
            **DECODER,
            num_experts=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
        ),
        QKVO
        | {f"expert{e}.{part}" for e in (0, 1) for part in ("gate", "up")}
        | {f"shared.{part}" for part in ("gate", "up")},
        {"mlp.gate", "mlp.shared_expert.down_proj", "mlp.experts.0.down_proj", "mlp.experts.1.down_proj"},
    ),
    "DeepSeek-V3": (
        hf(
            "DeepseekV3ForCausalLM",
            **(DECODER | {"num_key_value_heads": 4}),
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
            n_routed_experts=2,
            n_shared_experts=1,
            num_experts_per_tok=1,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
        ),
        {"q_a", "q_b", "kv_a", "kv_b", "out", "gate", "up"}
        | {f"{where}.{part}" for where in ("expert0", "expert1", "shared") for part in ("gate", "up")},
        {"mlp.gate", "mlp.down_proj", "mlp.shared_experts.down_proj"} | {f"mlp.experts.{e}.down_proj" for e in (0, 1)},
    ),
    "Swin": (
        hf("SwinModel", image_size=16, patch_size=4, embed_dim=8, depths=[1, 2], num_heads=[2, 2], window_size=2),
        PLAIN,
        {"output.dense", "downsample.reduction"},
    ),
    "torch": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24), 2),
        PLAIN | CROSS,
        {"linear2"},
    ),
    "torchvision ViT": (lambda: _torchvision("VisionTransformer", 16, 8, 2, 4, 16, 24), PLAIN, {"mlp.3"}),
    "torchvision Swin": (
        lambda: _torchvision("SwinTransformer", [2, 2], 8, [1, 2], [2, 2], [2, 2], mlp_ratio=2.0),
        PLAIN,
        {"mlp.3"},
    ),
    "torchvision Swin 2": (
        lambda: _torchvision("SwinTransformer", [2, 2], 8, [1, 2], [2, 2], [2, 2], mlp_ratio=2.0, second=True),
        PLAIN,
        {"mlp.3"},
    ),
    "timm EVA": (
        lambda: _timm("eva02_base_patch14_224", img_size=28, embed_dim=16, depth=2, num_heads=4),
        GATED,
        {"mlp.fc2"},
    ),
}


def _torchvision(name: str, *sizes: Any, second: bool = False, **settings: Any) -> nn.Module:
    from torchvision import models
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    if second:
        settings |= {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    with tiny.seeded():
        model: nn.Module = getattr(models, name)(*sizes, **settings, num_classes=2)
        return model.eval()


def _timm(name: str, **sizes: Any) -> nn.Module:
    import timm

    with tiny.seeded():
        return timm.create_model(name, pretrained=False, num_classes=2, **sizes).eval()


def on_disk(model: nn.Module, folder: Path) -> Shapes:
    """Shapes as the model's own library writes them, without integers, which are never merged."""
    if not hasattr(model, "save_pretrained"):
        return in_memory(model)
    model.save_pretrained(folder)
    return _floating(load_file(folder / "model.safetensors"))


def in_memory(model: nn.Module) -> Shapes:
    return _floating(model.state_dict())


def _floating(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor.is_floating_point()}


def llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**IMAGE), text_config=LlamaConfig(**DECODER), image_token_index=5
    )
    with tiny.seeded():
        return LlavaForConditionalGeneration(config)


def shifted(model: nn.Module) -> nn.Module:
    """A fine-tune: the model itself, changed."""
    model.load_state_dict(tiny.tuned(model.state_dict(), 1))
    return model
