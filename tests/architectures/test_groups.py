"""Every tensor of the families that are known falls into a group that a reader would put it in."""

import pytest

from safemerge_pl.architectures.groups import GROUPS, group_of, is_head

BERT, T5 = "bert.encoder.layer.1.", "encoder.block.0.layer.0."


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("attention in", "vision_model.encoder.layers.0.self_attn.q_proj.weight h.3.attn.c_attn.weight"),
        ("attention in", f"visual.transformer.resblocks.0.attn.in_proj_weight {T5}SelfAttention.q.weight"),
        ("attention in", "bert.encoder.layer.1.attention.self.key.weight model.layers.0.self_attn.qkv_proj.weight"),
        ("attention out", "model.layers.0.self_attn.o_proj.weight h.0.attn.c_proj.weight blocks.2.attn.proj.weight"),
        ("attention out", f"{BERT}attention.output.dense.weight {T5}EncDecAttention.o.weight"),
        ("feed-forward in", "model.layers.0.mlp.gate_proj.weight h.0.mlp.c_fc.weight layers.0.linear1.weight"),
        ("feed-forward in", f"{BERT}intermediate.dense.weight {T5}DenseReluDense.wi_0.weight"),
        ("feed-forward in", "model.layers.0.mlp.experts.3.up_proj.weight encoder.layers.0.fc1.weight"),
        ("feed-forward out", "model.layers.0.mlp.down_proj.weight h.0.mlp.c_proj.weight layers.0.linear2.weight"),
        ("feed-forward out", f"{BERT}output.dense.weight {T5}DenseReluDense.wo.weight"),
        ("embeddings", "model.embed_tokens.weight shared.weight wte.weight vision_model.embeddings.class_embedding"),
        ("embeddings", "visual.conv1.weight patch_embed.proj.weight cls_token visual.positional_embedding"),
        ("norms and biases", "model.norm.weight h.0.ln_1.weight vision_model.pre_layrnorm.bias visual.ln_pre.weight"),
        ("norms and biases", "bert.encoder.layer.1.attention.output.LayerNorm.weight blocks.0.mlp.fc1.bias"),
        ("head", "lm_head.weight classifier.bias classifier.weight head.weight visual.proj visual_projection.weight"),
        ("other", "logit_scale model.layers.0.mixer.A_log"),
    ],
)
def test_the_group_of_a_name(group: str, names: str) -> None:
    assert group in GROUPS
    assert {name: group_of(name) for name in names.split()} == dict.fromkeys(names.split(), group)


def test_a_head_lies_outside_of_the_blocks() -> None:
    assert not is_head("blocks.0.attn.proj.weight")
    assert not is_head("encoder.layers.0.fc1.weight")
    assert is_head("model.score.weight")
