"""Adapters inside a module: what they add to the weights, and the names of a model without them."""

import re
from typing import Any

import pytest
import tiny
import torch

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.checkpoints.adapter_modules import adapter_deltas, adapter_names, plain_name

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


def adapted(**settings: Any) -> Any:
    import peft

    config: dict[str, Any] = {"target_modules": ["qkv", "fc1"], "r": 2, "lora_alpha": 6, "init_lora_weights": False}
    with tiny.seeded():
        return peft.get_peft_model(tiny.timm_vit(), peft.LoraConfig(**(config | settings)))


def test_a_module_without_adapters_has_none() -> None:
    assert (adapter_names(tiny.timm_vit()), adapter_deltas(tiny.timm_vit())) == (set(), {})


def test_the_names_of_adapters_and_of_the_model_are_those_of_the_wrapped_one() -> None:
    plain, wrapped = tiny.timm_vit(), adapted()
    theirs = adapter_names(wrapped)
    assert {plain_name(name) for name in wrapped.state_dict()} - theirs == set(plain.state_dict())
    assert len(theirs) == 2 * len(adapter_deltas(wrapped)) == 8
    assert all(".lora_" in name for name in theirs)


def test_what_adapters_add_is_what_peft_adds() -> None:
    wrapped, before = adapted(), tiny.timm_vit().state_dict()
    deltas = adapter_deltas(wrapped)
    after = wrapped.merge_and_unload().state_dict()
    for name, tensor in before.items():
        torch.testing.assert_close(tensor + deltas.get(name, 0.0), after[name], rtol=1e-6, atol=1e-7)
    assert all(bool(delta.any()) for delta in deltas.values())


def test_of_several_adapters_the_active_ones_add_up() -> None:
    import peft

    wrapped = adapted()
    wrapped.add_adapter("second", peft.LoraConfig(target_modules=["fc1"], r=3, init_lora_weights=False))
    first = adapter_deltas(wrapped)
    wrapped.base_model.set_adapter(["default", "second"])
    both = adapter_deltas(wrapped)
    assert first.keys() == both.keys()
    changed = {name for name in first if not torch.equal(first[name], both[name])}
    assert changed == {f"blocks.{i}.mlp.fc1.weight" for i in (0, 1)}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"use_dora": True}, "DoRA"), ({"lora_bias": True}, "trains a bias in its adapter")],
    ids=["DoRA", "bias"],
)
def test_what_is_no_sum_of_weight_and_update_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=rf"adapter `.*qkv` .*{re.escape(reason)}.*use plain LoRA"):
        adapter_deltas(adapted(**settings))


def test_an_adapter_of_a_parameter_itself_is_refused() -> None:
    """Of experts that are fused in memory; its update would go under a name that no weight has."""
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    wrapped = peft.get_peft_model(tiny.hf_mixtral(), settings)
    with pytest.raises(CheckpointError, match=r"experts` is on the parameter `gate_up_proj` itself.*use plain LoRA"):
        adapter_deltas(wrapped)


def test_an_adapter_that_is_merged_into_its_weight_is_refused() -> None:
    wrapped = adapted()
    wrapped.merge_adapter()
    with pytest.raises(CheckpointError, match="merged into its weight"):
        adapter_deltas(wrapped)
    wrapped.unmerge_adapter()
    assert adapter_deltas(wrapped)
