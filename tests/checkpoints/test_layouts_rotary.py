"""Llama files in their makers' layout are not mixed with transformers' rows, wherever the two layouts meet."""

from pathlib import Path

import pytest
import tiny
import torch
from tiny import Add, Tensors
from tiny_adapters import QV, trained

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger

NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def llama() -> Tensors:
    return tiny.copied(tiny.hf_llama().state_dict())


def makers(tensors: Tensors) -> Tensors:
    """The makers' names; values do not matter to a refusal by name."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        found[name.removeprefix("model.")] = tensor
    return found


def fused(tensors: Tensors) -> Tensors:
    """q, k and v in one matrix, as Phi-3 has them."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(("k_proj.weight", "v_proj.weight"))}
    for name in [name for name in found if name.endswith("q_proj.weight")]:
        parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        del found[name]
        found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    return found


def refusal(base: Tensors, incoming: Tensors | Path) -> str:
    merger = ContinualMerger(base, Add())
    before = merger.fingerprint()
    with pytest.raises(CheckpointError, match="`wq`, `wk`") as caught:
        merger.fold(incoming, "task1")
    assert merger.fingerprint() == before
    return str(caught.value)


def test_a_fine_tune_in_the_other_order_is_refused_either_way() -> None:
    tensors = llama()
    tuned = tiny.tuned(tensors, 1)
    assert "holds `layers.0.attention.wq.weight` for" in refusal(tensors, makers(tuned))
    assert "for the pretrained model's `layers.0.attention.wq.weight`" in refusal(makers(tensors), tuned)


def test_rows_of_a_fused_matrix_are_no_way_round_it() -> None:
    """Its last rows are values, whose order is the same; the first are not."""
    tensors = llama()
    assert "qkv_proj.weight`" in refusal(fused(tensors), makers(tiny.tuned(tensors, 1)))
    assert "qkv_proj.weight`" in refusal(makers(tensors), fused(tiny.tuned(tensors, 1)))


def test_two_models_of_the_makers_are_merged() -> None:
    tensors = makers(llama())
    assert ContinualMerger(tensors, Add()).fold(tiny.tuned(tensors, 1), "task1").kept_fraction == 1.0


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
def test_an_adapter_is_refused_on_the_other_order(tmp_path: Path) -> None:
    trained(tiny.hf_llama(), tmp_path / "adapter", **QV)
    assert "for the pretrained model's `layers.0.attention.wq.weight`" in refusal(makers(llama()), tmp_path / "adapter")


def test_an_output_is_not_written_in_the_other_order(tmp_path: Path) -> None:
    tensors = llama()
    merger = ContinualMerger(tensors, Add())
    merger.fold(tiny.tuned(tensors, 1), "task1")
    with pytest.raises(CheckpointError, match="`wq`, `wk`"):
        merger.save(tmp_path / "out", template=makers(tensors))
    assert not (tmp_path / "out").exists()
