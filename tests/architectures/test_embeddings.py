"""Embeddings, position tables and output heads by name, against what each family's own modules are."""

import pytest
import tiny
import torch
from tiny import Tensors
from tiny_families import FAMILIES, TEXT, hf, llava
from torch import nn

from safemerge_pl.architectures.embeddings import (
    is_embedding,
    is_position_table,
    is_tied_candidate,
    is_vocabulary,
    shared_names,
)
from safemerge_pl.architectures.layers import select_layers
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, TaskArithmetic

MODELS = {name: family[0] for name, family in FAMILIES.items()} | {
    "CLIP": tiny.hf_clip,
    "open_clip": tiny.open_clip_model,
    "T5": tiny.hf_t5,
    "Llama": tiny.hf_llama,
    "GPT-2": tiny.hf_gpt2,
    "LLaVA": llava,
    "BERT with a head": hf("BertForMaskedLM", **TEXT),
    "GPT-NeoX": hf("GPTNeoXForCausalLM", **TEXT),
    "ALBERT": hf("AlbertModel", **TEXT, embedding_size=8),
    "ELECTRA": hf("ElectraModel", **TEXT, embedding_size=8),
    "Bloom": hf("BloomForCausalLM", hidden_size=16, n_layer=1, n_head=2, vocab_size=32),
}


@pytest.mark.parametrize("family", MODELS)
def test_lookup_tables_are_told_from_linear_layers(family: str) -> None:
    modules = dict(MODELS[family]().named_modules(remove_duplicate=False))
    tables = [f"{name}.weight" for name, module in modules.items() if isinstance(module, nn.Embedding)]
    linear = [f"{name}.weight" for name, module in modules.items() if isinstance(module, nn.Linear)]
    assert [name for name in tables if not is_embedding(name)] == []
    assert [name for name in linear if is_embedding(name)] == []


@pytest.mark.parametrize("family", MODELS)
def test_every_lookup_table_is_of_words_or_of_positions_or_of_token_types(family: str) -> None:
    for name, module in MODELS[family]().named_modules():
        if isinstance(module, nn.Embedding) and "token_type" not in name:
            assert is_vocabulary(f"{name}.weight") != is_position_table(f"{name}.weight"), name


@pytest.mark.parametrize("family", MODELS)
def test_what_a_family_ties_may_be_tied(family: str) -> None:
    weights: dict[int, list[str]] = {}
    for name, tensor in MODELS[family]().state_dict().items():
        if tensor.numel() and tensor.ndim == 2:
            weights.setdefault(tensor.data_ptr(), []).append(name)
    tied = [names for names in weights.values() if len(names) > 1]
    assert [names for names in tied if not any(map(is_tied_candidate, names))] == []


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_out.weight"])
def test_an_output_head_is_a_linear_layer_under_any_name(name: str) -> None:
    """GPT-NeoX calls its head ``embed_out``, which is multiplied with all the same."""
    shapes = {"layers.0.mlp.fc1.weight": (8, 4), name: (32, 4), "embed_in.weight": (32, 4)}
    chosen = [layer.parameter for layer in select_layers(shapes, scope="linear")]
    assert chosen == ["layers.0.mlp.fc1.weight", name]


@pytest.mark.parametrize("family", ["ALBERT", "ELECTRA"])
def test_a_projection_of_embeddings_is_a_linear_layer_outside_of_the_blocks(family: str) -> None:
    """Merged by methods of every linear layer; a method of attention and feed-forward leaves it pretrained."""
    base = tiny.copied(MODELS[family]().state_dict())
    (name,) = (name for name in base if "hidden_mapping_in.weight" in name or "embeddings_project.weight" in name)
    assert name in [layer.parameter for layer in ContinualMerger(base, OPCM()).layers]
    if family == "ELECTRA":
        assert name not in [layer.parameter for layer in ContinualMerger(base, tiny.fast_method()).layers]


def with_positions(name: str, rows: int) -> Tensors:
    return tiny.tower() | {name: tiny.randn(rows, 8, seed=rows)}


@pytest.mark.parametrize("name", ["wpe.weight", "decoder.embed_positions.weight", "relative_attention_bias.weight"])
def test_position_tables_of_language_models_are_treated_as_those_of_vision_models(name: str) -> None:
    """Another length is refused with the remedy, or no row of the other table is merged: it is another place's."""
    base, incoming = with_positions(name, 6), tiny.tuned(with_positions(name, 9), 1)
    for method in (tiny.Add(), TaskArithmetic(scaling=1.0)):
        with pytest.raises(CheckpointError, match=f"{name}.*`on_mismatch` 'pretrained'"):
            ContinualMerger(base, method).fold(incoming, task="a")
        merger = ContinualMerger(base, method, on_mismatch="pretrained")
        merger.fold(incoming, task="a")
        assert torch.equal(merger.merged[name], base[name])
        assert not torch.equal(merger.merged[tiny.FC1], base[tiny.FC1])


@pytest.mark.parametrize("name", ["embed_in.weight", "embeddings.tok_embeddings.weight"])
def test_rows_of_another_vocabulary_are_merged_where_both_models_have_them(name: str) -> None:
    base, incoming = with_positions(name, 6), tiny.tuned(with_positions(name, 6), 1)
    incoming[name] = torch.cat([incoming[name], tiny.randn(3, 8)])
    with pytest.raises(CheckpointError, match="resize its embeddings"):
        ContinualMerger(base, TaskArithmetic(scaling=1.0)).fold(incoming, task="a")
    merger = ContinualMerger(base, TaskArithmetic(scaling=1.0), on_mismatch="pretrained")
    merger.fold(incoming, task="a")
    torch.testing.assert_close(merger.merged[name], incoming[name][:6])


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "unshared.weight"])
def test_only_an_embedding_of_encoder_and_decoder_has_other_names(name: str) -> None:
    assert shared_names(name) == []
