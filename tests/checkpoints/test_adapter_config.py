"""Settings of adapters: what is not read is refused by name, with the remedy."""

from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny_adapters import configured, refusal

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]  # of peft

OTHERS = {
    "IA3": lambda peft: peft.IA3Config(target_modules=["q_proj", "fc2"], feedforward_modules=["fc2"]),
    "LOHA": lambda peft: peft.LoHaConfig(r=2, target_modules=["q_proj"]),
    "LOKR": lambda peft: peft.LoKrConfig(r=2, target_modules=["q_proj"]),
    "ADALORA": lambda peft: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, tinit=1, tfinal=1),
    "VERA": lambda peft: peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "OFT": lambda peft: peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"]),
    "BOFT": lambda peft: peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"]),
    "LN_TUNING": lambda peft: peft.LNTuningConfig(target_modules=["layer_norm1"]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_type_of_adapter_is_refused_by_name_with_the_remedy(kind: str, tmp_path: Path) -> None:
    """As peft writes it."""
    import peft

    peft.get_peft_model(tiny.hf_vision(), OTHERS[kind](peft)).save_pretrained(tmp_path)
    message = refusal(tmp_path)
    assert f"PEFT adapter of type {kind}" in message
    assert "merge_and_unload()" in message


def test_a_prompt_is_refused_by_name(tmp_path: Path) -> None:
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(tiny.hf_gpt2(), config).save_pretrained(tmp_path)
    assert "PEFT adapter of type PROMPT_TUNING" in refusal(tmp_path)


VARIANT_SETTINGS: dict[str, Any] = {
    "target_parameters": ["experts.gate_up_proj"],
    "trainable_token_indices": [1],
    "layer_replication": [[0, 2]],
    "alora_invocation_tokens": [1],
    "use_qalora": True,
    "init_lora_weights": "pissa_niter_4",
    "something_of_next_year": {"on": True},
}


@pytest.mark.parametrize("setting", VARIANT_SETTINGS)
def test_a_variant_that_is_not_known_is_refused_by_name(setting: str, adapter: Path) -> None:
    """The setting is named, also one that does not exist yet."""
    message = refusal(configured(adapter, **{setting: VARIANT_SETTINGS[setting]}))
    assert f"`{setting}`" in message
    assert "merge_and_unload()" in message


@pytest.mark.parametrize("content", ["", "[]", "5", "{"])
def test_a_damaged_configuration_is_named(content: str, adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text(content)
    assert "adapter_config.json" in refusal(adapter) or "type None" in refusal(adapter)


@pytest.mark.parametrize(
    "settings",
    [{"r": 0}, {"lora_alpha": "8"}, {"rank_pattern": {"q_proj": None}}, {"alpha_pattern": ["q_proj"]}, {"r": -2}],
)
def test_ranks_and_alphas_that_are_none_are_refused(settings: dict[str, Any], adapter: Path) -> None:
    assert "must be positive numbers" in refusal(configured(adapter, **settings))
