"""Queries and keys in the makers' order beside transformers': refused by name where the heads cannot be told."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from makers import HEADS, PARAMS, SIZE, fused, interleave, llama, makers, mistral_folder, plain
from tiny import Add, Tensors
from tiny_adapters import QV, trained

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger


def refusal(base: Any, incoming: Any) -> str:
    merger = ContinualMerger(base, Add())
    before = merger.fingerprint()
    with pytest.raises(CheckpointError, match="`wq`, `wk`") as caught:
        merger.fold(incoming, "task1")
    assert (merger.fingerprint(), merger.tasks) == (before, [])
    return str(caught.value)


def tensors() -> Tensors:
    return plain(llama())


def test_a_fine_tune_in_the_other_order_is_refused_either_way_where_nothing_tells_the_heads() -> None:
    tuned = tiny.tuned(tensors(), 1)
    assert "holds `layers.0.attention.wq.weight` for" in refusal(tensors(), makers(tuned))
    assert "for the pretrained model's `layers.0.attention.wq.weight`" in refusal(makers(tensors()), tuned)


def test_rows_of_a_fused_matrix_are_no_way_round_it() -> None:
    """Its last rows are values, whose order is the same; the first are not."""
    tuned = tiny.tuned(tensors(), 1)
    assert "qkv_proj.weight`" in refusal(fused(tensors()), makers(tuned))
    assert "qkv_proj.weight`" in refusal(makers(tensors()), fused(tuned))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
def test_an_adapter_is_refused_on_the_other_order(tmp_path: Path) -> None:
    trained(llama(), tmp_path / "adapter", **QV)
    message = refusal(makers(tensors()), tmp_path / "adapter")
    assert "for the pretrained model's `layers.0.attention.wq.weight`" in message


def test_an_output_is_not_written_in_the_other_order(tmp_path: Path) -> None:
    merger = ContinualMerger(tensors(), Add())
    merger.fold(tiny.tuned(tensors(), 1), "task1")
    with pytest.raises(CheckpointError, match="`wq`, `wk`"):
        merger.save(tmp_path / "out", template=makers(tensors()))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("makers_base", [True, False])
@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (None, "no config.json or params.json"),
        ({}, "no config.json or params.json"),
        ({"dim": 16, "n_heads": 3}, "no config.json or params.json"),
        ({"dim": "16", "n_heads": 4}, "no config.json or params.json"),
        ({"head_dim": 3}, "heads of 3 rows"),
        ({"head_dim": 6}, "heads of 6 rows"),
        ({"head_dim": True}, "no config.json or params.json"),
        ({"dim": 16, "n_heads": 4, "partial_rotary_factor": 0.5}, "part of each head"),
    ],
)
def test_settings_that_do_not_tell_are_named(
    params: dict[str, Any] | None, reason: str, makers_base: bool, tmp_path: Path
) -> None:
    tuned = tiny.tuned(tensors(), 1)
    if makers_base:
        message = refusal(mistral_folder(makers(tensors()), tmp_path / "own", params), tuned)
    else:
        message = refusal(tensors(), mistral_folder(makers(tuned), tmp_path / "own", params))
    assert "attention.w" in message
    assert reason in message


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    own = mistral_folder(makers(tensors()), tmp_path / "own", PARAMS | {"n_heads": 2})
    assert f"contradict each other about the rows of a head ({[SIZE, HEADS * SIZE // 2]})" in refusal(
        tmp_path / "base", own
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "cohere"}, "cohere"),  # transformers itself keeps these side by side
        ({"model_type": "qwen2"}, "qwen2"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "part of each head"),
    ],
)
def test_another_rotation_is_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(json.dumps(config | change))
    assert reason in refusal(tmp_path / "base", makers(tensors()))


def test_norms_of_heads_are_refused(tmp_path: Path) -> None:
    norms = {f"model.layers.0.self_attn.{part}_norm.weight": torch.ones(SIZE) for part in "qk"}
    message = refusal(tensors() | norms, mistral_folder(makers(tensors()), tmp_path / "own"))
    assert "norm of the heads" in message


def test_the_heads_of_a_vision_tower_are_refused(tmp_path: Path) -> None:
    """Mistral's own file of a Pixtral has other heads in its vision encoder than the settings say of the words."""
    base = tiny.renamed({name: each for name, each in tensors().items() if "layers" in name}, "model.", "vision.")
    own = tiny.renamed(makers({name: each for name, each in tensors().items() if "layers" in name}), "", "vision.")
    assert "vision tower" in refusal(base, mistral_folder(own, tmp_path / "own"))


def test_torchtune_s_own_names_are_refused_for_their_order(tmp_path: Path) -> None:
    """It keeps Llama's rows as Meta does and Qwen's as transformers does, both as `attn.q_proj`."""
    llama().save_pretrained(tmp_path / "base")
    own = {
        name.removeprefix("model.").replace("self_attn.", "attn.").replace("o_proj", "output_proj"): tensor
        for name, tensor in makers_order(tensors()).items()
    }
    merger = ContinualMerger(tmp_path / "base", Add(), layers=["*.q_proj.weight", "*.k_proj.weight"])
    with pytest.raises(CheckpointError, match=r"holds `layers\.0\.attn\.\w_proj\.weight` for .*torchtune"):
        merger.fold(own, "task1")
    values = ContinualMerger(tmp_path / "base", Add(), layers=["*.v_proj.weight"])
    values.fold(own, "task1")
    assert values.tasks == ["task1"]


def makers_order(found: Tensors) -> Tensors:
    return {name: interleave(each) if "q_proj" in name or "k_proj" in name else each for name, each in found.items()}
