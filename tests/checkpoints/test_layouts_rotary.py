"""Llama files in their makers' layout are not mixed with transformers' rows."""

import pytest
import torch

from safemerge_pl.checkpoints.layouts import convert_layout
from safemerge_pl.checkpoints.tensors import Memory
from safemerge_pl.errors import CheckpointError

OURS = "model.layers.0.self_attn.q_proj.weight"
THEIRS = "layers.0.attention.wq.weight"


@pytest.mark.parametrize(("base", "other"), [(OURS, THEIRS), (THEIRS, OURS)])
def test_another_rotary_order_is_refused_by_name(base, other):
    pretrained = Memory({base: torch.eye(4)}, "base")
    with pytest.raises(CheckpointError, match="makers' layout") as error:
        convert_layout(pretrained, [base], Memory({other: torch.eye(4)}, "fine-tune"))
    assert other in str(error.value)
