"""Llama and Mistral in their makers' own files: rotary pairs lie side by side, in transformers in halves of a head.

What is refused of this is in ``test_head_size.py``.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import tiny
import torch
from makers import HEADS, KEY_HEADS, PARAMS, SIZE, fused, llama, makers, meta_folder, mistral_folder, plain
from safetensors.torch import save_file
from tiny import Add, Tensors
from tiny_adapters import QV, trained, unloaded

import safemerge_pl as sm
from safemerge_pl.checkpoints import open_checkpoint
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, TaskArithmetic
from safemerge_pl.scoring import expert_weights

SETTINGS: dict[str, dict[str, Any]] = {
    "SafeMerge": {"scoring_rank": 4, "recovery_rank": 3, "task_rank": 2, "num_steps": 3},
    "NUFILT": {"null_rank": 4, "recovery_rank": 3, "task_rank": 2, "num_steps": 3},
    "SafeShare": {"scoring_rank": 4, "shared_rank": 4},
    "WUDIMerging": {"num_steps": 3},
}
METHODS = sorted(name for name in sm.methods.__all__ if name not in ("MergeMethod", "Stack", "StackResult", "Vectors"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One base and one fine-tune as each library saves them."""
    place = tmp_path_factory.mktemp("makers")
    model = llama()
    base, expert = plain(model), tiny.tuned(plain(model), 1)
    model.save_pretrained(place / "base")
    model.load_state_dict(expert)
    model.save_pretrained(place / "expert")
    for name, tensors in (("base", base), ("expert", expert)):
        mistral_folder(makers(tensors), place / f"{name}_mistral")
        meta_folder(makers(tensors), place / f"{name}_meta")
    return place


def merged(base: Any, incoming: Any, method: Any) -> tuple[Tensors, str]:
    merger = ContinualMerger(base, method)
    report = merger.fold(incoming, "task1")
    return merger.merged, report.incoming


def test_both_files_are_one_network() -> None:
    """Scores of queries and keys under each library's own rotation: transformers' and Meta's with complex numbers."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    tensors = plain(llama())
    own = makers(tensors)
    x, places = tiny.randn(5, HEADS * SIZE), torch.arange(5.0)
    angles = places[:, None] * 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    q, k = ((x @ tensors[f"model.layers.0.self_attn.{part}_proj.weight"].T) for part in "qk")
    q, k = (each.view(5, -1, SIZE).transpose(0, 1)[None] for each in (q, k))
    twice = torch.cat([angles, angles], -1)[None]
    q, k = apply_rotary_pos_emb(q, k, twice.cos(), twice.sin())
    expected = q @ k.repeat_interleave(HEADS // KEY_HEADS, 1).transpose(-1, -2)
    q, k = ((x @ own[f"layers.0.attention.w{part}.weight"].T).view(5, -1, SIZE) for part in "qk")
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    q, k = (
        torch.view_as_real(torch.view_as_complex(each.reshape(5, -1, SIZE // 2, 2)) * turns).flatten(2)
        for each in (q, k)
    )
    found = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // KEY_HEADS, 1))
    torch.testing.assert_close(found[None], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_a_makers_file_gives_the_merge_of_the_same_model_saved_by_transformers(name: str, folders: Path) -> None:
    """For every method, to the last bit, other kinds of file and matrices of fewer key heads included."""
    method = getattr(sm.methods, name)
    expected = merged(folders / "base", folders / "expert", method(**SETTINGS.get(name, {})))
    for own in ("expert_mistral", "expert_meta"):
        found = merged(folders / "base", folders / own, method(**SETTINGS.get(name, {})))
        tiny.assert_same(found[0], expected[0])
        assert found[1] == expected[1]


@pytest.mark.parametrize("method", [tiny.fast_method, TaskArithmetic, OPCM])
@pytest.mark.parametrize("own", ["mistral", "meta"])
def test_and_the_other_way_round(own: str, method: Any, folders: Path) -> None:
    """A fine-tune saved by transformers on the makers' base."""
    base = folders / f"base_{own}"
    expected = merged(base, folders / f"expert_{own}", method())
    found = merged(base, folders / "expert", method())
    tiny.assert_same(found[0], expected[0])
    assert found[1] == expected[1]


def test_a_library_reads_what_was_merged_on_either_base(folders: Path, tmp_path: Path) -> None:
    """One network, whichever base it was merged on: the fine-tune itself, where whole task vectors are added."""
    from transformers import LlamaForCausalLM

    words = torch.arange(6)[None]
    expected = LlamaForCausalLM.from_pretrained(folders / "expert")(words).logits
    merger = ContinualMerger(folders / "base", TaskArithmetic(scaling=1.0))
    merger.fold(folders / "expert_meta", "task1")
    merger.save(tmp_path / "out")
    found = LlamaForCausalLM.from_pretrained(tmp_path / "out")(words).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_model_in_memory_knows_its_heads(folders: Path) -> None:
    model = llama()
    expert = tiny.tuned(plain(model), 1)
    tiny.assert_same(merged(model, makers(expert), Add())[0], merged(model, expert, Add())[0])


def test_a_file_given_by_its_path_has_its_settings_beside_it(folders: Path) -> None:
    base, expert = plain(llama()), tiny.tuned(plain(llama()), 1)
    for path in ("expert_meta/consolidated.00.pth", "expert_mistral/consolidated.safetensors"):
        tiny.assert_same(merged(base, folders / path, Add())[0], merged(base, expert, Add())[0])


@pytest.mark.parametrize("makers_have_it", [True, False])
def test_rotary_frequencies_tell_the_rows_of_a_head(makers_have_it: bool) -> None:
    """Llama 2 keeps `rope.freqs`, earlier versions of transformers a buffer in each block."""
    base, expert = plain(llama()), tiny.tuned(plain(llama()), 1)
    frequencies = 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    own = makers(expert)
    if makers_have_it:
        own["rope.freqs"] = frequencies
    else:
        base |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": frequencies for i in range(2)}
    found, expected = (merged(base, each, Add())[0] for each in (own, expert))
    tiny.assert_same(found, expected)


def test_biases_of_queries_and_keys_follow(tmp_path: Path) -> None:
    model = llama(attention_bias=True)
    model.load_state_dict(tiny.tuned(plain(model), 5))
    model.save_pretrained(tmp_path / "base")
    expert = tiny.tuned(plain(model), 1)
    own = mistral_folder(makers(expert), tmp_path / "own")
    for method in (TaskArithmetic(), OPCM()):
        tiny.assert_same(merged(tmp_path / "base", own, method)[0], merged(tmp_path / "base", expert, method)[0])


@pytest.mark.parametrize("fused_base", [True, False])
def test_rows_of_a_fused_matrix_are_reordered_but_for_the_values(fused_base: bool, tmp_path: Path) -> None:
    """Q, k and v in one matrix, in transformers' order, on either side."""
    base, expert = plain(llama()), tiny.tuned(plain(llama()), 1)
    if fused_base:
        own = meta_folder(makers(expert), tmp_path / "own")
        found, expected = (merged(fused(base), each, Add())[0] for each in (own, fused(expert)))
    else:
        own = meta_folder(makers(base), tmp_path / "own")
        found, expected = (merged(own, each, Add())[0] for each in (fused(expert), makers(expert)))
    tiny.assert_same(found, expected)


def test_a_mixture_of_experts_crosses_with_its_router(tmp_path: Path) -> None:
    """Mixtral as Mistral writes it: experts in the feed-forward, the router as its gate."""
    from transformers import MixtralConfig, MixtralForCausalLM

    with tiny.seeded():
        model = MixtralForCausalLM(
            MixtralConfig(
                hidden_size=HEADS * SIZE,
                intermediate_size=16,
                num_hidden_layers=2,
                vocab_size=16,
                num_attention_heads=HEADS,
                num_key_value_heads=KEY_HEADS,
                num_local_experts=2,
            )
        )
    model.save_pretrained(tmp_path / "base")
    base = dict(open_checkpoint(tmp_path / "base"))
    expert = tiny.tuned(base, 1)
    own = mistral_folder(makers(expert), tmp_path / "own")
    for method in (tiny.fast_method(), TaskArithmetic()):
        tiny.assert_same(merged(tmp_path / "base", own, method)[0], merged(tmp_path / "base", expert, method)[0])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
@pytest.mark.parametrize("settings", [QV, {"target_modules": ["k_proj", "o_proj", "up_proj"]}, QV | {"bias": "all"}])
def test_an_adapter_of_transformers_goes_on_the_makers_base(settings: dict[str, Any], tmp_path: Path) -> None:
    """The merge of what peft makes of it, in the makers' order."""
    model = llama(attention_bias=True)
    base = plain(model)
    own = mistral_folder(makers(base), tmp_path / "own")
    expert = unloaded(trained(model, tmp_path / "adapter", **settings))
    found, expected = (merged(own, each, OPCM())[0] for each in (tmp_path / "adapter", makers(expert)))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
    assert any(not torch.equal(found[name], makers(base)[name]) for name in found if ".wq." in name or ".wk." in name)


@pytest.mark.parametrize("whole", [True, False])
def test_an_adapter_of_the_makers_goes_on_the_base_of_transformers(whole: bool, folders: Path, tmp_path: Path) -> None:
    """Factors of wq and wk, and a wk that was trained whole and saved beside the factors."""
    base = plain(llama())
    factors, expert = {}, makers(base)
    for place, name in enumerate(sorted(name for name in expert if ".wq." in name or ".wk." in name)):
        rows, columns = expert[name].shape
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if whole and ".wk." in name:
            expert[name] = factors[f"{module}.weight"] = expert[name] + 0.1 * tiny.randn(rows, columns, seed=place)
            continue
        up, down = 0.1 * tiny.randn(rows, 2, seed=place), 0.1 * tiny.randn(2, columns, seed=50 + place)
        factors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        expert[name] = expert[name] + up @ down
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter/adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["wq", "wk"], "bias": "none"}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    dense = mistral_folder(expert, tmp_path / "dense")
    found, expected = (merged(folders / "base", each, Add())[0] for each in (tmp_path / "adapter", dense))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
    assert not torch.equal(
        found["model.layers.1.self_attn.k_proj.weight"], base["model.layers.1.self_attn.k_proj.weight"]
    )


def test_an_output_is_written_for_a_template_in_the_other_order(folders: Path, tmp_path: Path) -> None:
    merger = ContinualMerger(folders / "base", Add())
    merger.fold(folders / "expert_meta", "task1")
    merger.save(tmp_path / "out", template=folders / "base_mistral")
    tiny.assert_same(dict(open_checkpoint(tmp_path / "out")), makers(merger.merged))


def test_the_row_of_an_expert_alone_is_in_the_order_of_the_backbone(folders: Path) -> None:
    found = expert_weights(llama(), folders / "expert_meta")
    tiny.assert_same(found, tiny.tuned(plain(llama()), 1))


def test_two_models_of_the_makers_need_no_settings() -> None:
    base, expert = makers(plain(llama())), makers(tiny.tuned(plain(llama()), 1))
    found = merged(base, expert, Add())[0]
    torch.testing.assert_close(found["layers.0.attention.wq.weight"], expert["layers.0.attention.wq.weight"])


def test_what_has_no_order_is_merged_without_settings() -> None:
    base, expert = plain(llama()), tiny.tuned(plain(llama()), 1)
    merger = ContinualMerger(base, Add(), layers=["*.gate_proj.weight", "*.v_proj.weight"])
    merger.fold(makers(expert), "task1")
    for name in merger.plan.parameters:
        torch.testing.assert_close(merger.merged[name], expert[name], rtol=0, atol=1e-6)


def test_a_merge_on_the_makers_base_keeps_their_files(folders: Path, tmp_path: Path) -> None:
    """The name of the weight file and the settings that their library reads; and it is continued tomorrow."""
    merger = ContinualMerger(folders / "base_mistral", tiny.fast_method())
    merger.fold(folders / "expert", "task1")
    merger.save(tmp_path / "out")
    assert json.loads((tmp_path / "out/params.json").read_text()) == PARAMS
    with safetensors.safe_open(tmp_path / "out/consolidated.safetensors", framework="pt") as handle:
        assert set(handle.keys()) == set(makers(plain(llama())))
    again = ContinualMerger.load(tmp_path / "out", folders / "base_mistral")
    assert again.fingerprint() == merger.fingerprint()


def test_the_card_of_a_merge_on_metas_base_names_no_loader_that_reads_only_pickles(
    folders: Path, tmp_path: Path
) -> None:
    merger = ContinualMerger(folders / "base_meta", Add())
    merger.fold(folders / "expert", "task1")
    merger.save(tmp_path / "out")
    assert "`torch.save` them as `consolidated.00.pth`" in (tmp_path / "out/README.md").read_text()
    found = ContinualMerger(folders / "base_meta", Add())
    found.fold(tmp_path / "out", "task1")
    assert found.reports[0].incoming == merger.fingerprint()
