"""What an incoming model may differ in: image size, vocabulary, settings, provenance."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fitting import POSITIONS, notes, refusal, tower_at
from tiny import (
    Add,
    Tensors,
)

from safemerge_pl.checkpoints.tensors import Memory
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, TaskArithmetic
from safemerge_pl.scoring import expert_weights


@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_a_fine_tune_at_another_image_size_is_refused_with_both_shapes(prefix: str) -> None:
    """The position table is not merged, but the attention was trained for another grid."""
    incoming = tiny.renamed(tower_at(12, seed=1), "", prefix)
    message = refusal(ContinualMerger(tower_at(8), Add()), incoming)
    assert f"`{prefix}{POSITIONS}` has shape (10, 8)" in message
    assert f"`{POSITIONS}` has (5, 8)" in message
    assert "`on_mismatch` 'pretrained'" in message


def test_a_fine_tune_at_another_image_size_is_taken_when_asked_for() -> None:
    """The merged layers are those of the fine-tune, the table is the pretrained one, and a note says so."""
    base, incoming = tower_at(8), tower_at(12, seed=1)
    merger = ContinualMerger(base, Add(), on_mismatch="pretrained")
    (note,) = merger.fold(incoming, "task1").notes
    assert f"`{POSITIONS}` has shape (10, 8), the pretrained model's (5, 8)" in note
    assert torch.equal(merger.merged[POSITIONS], base[POSITIONS])
    torch.testing.assert_close(merger.merged[tiny.FC1], incoming[tiny.FC1])


def test_a_merged_position_table_of_another_size_stays_pretrained() -> None:
    """A row of the other table stands for another place, so nothing of it is merged."""
    base, incoming = tower_at(8), tower_at(12, seed=1)
    assert "`on_mismatch` 'pretrained'" in refusal(ContinualMerger(base, TaskArithmetic()), incoming)
    merger = ContinualMerger(base, TaskArithmetic(scaling=1.0), on_mismatch="pretrained")
    assert POSITIONS in merger.fold(incoming, "task1").notes[0]
    assert torch.equal(merger.merged[POSITIONS], base[POSITIONS])
    torch.testing.assert_close(merger.merged["pre_layrnorm.weight"], incoming["pre_layrnorm.weight"])
    module = tiny.hf_vision()
    module.load_state_dict({name: tensor for name, tensor in base.items() if name in module.state_dict()})
    assert torch.equal(expert_weights(module, incoming)[POSITIONS], base[POSITIONS])


def t5_with(rows: int) -> Tensors:
    """A T5 whose first rows do not depend on how many there are."""
    tensors = tiny.copied(tiny.hf_t5(tie_word_embeddings=False).state_dict())
    for name in ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tiny.randn(64, 8, seed=7 if name != "lm_head.weight" else 8)[:rows].clone()
    return tensors


@pytest.mark.parametrize("rows", [15, 17, 32])
def test_another_vocabulary_is_noted_where_embeddings_stay_pretrained(rows: int) -> None:
    """A token more or less, and padding to a round number."""
    base = t5_with(16)
    merger = ContinualMerger(base, Add())
    found = merger.fold(tiny.tuned(t5_with(rows), 1), "task1").notes
    assert len(found) == 4
    assert f"`shared.weight` has shape ({rows}, 8), the pretrained model's (16, 8); it is not merged" in found[0]
    assert torch.equal(merger.merged["shared.weight"], base["shared.weight"])


@pytest.mark.parametrize("rows", [15, 17, 32])
def test_another_vocabulary_is_refused_where_embeddings_are_merged(rows: int) -> None:
    """With the remedy; or the rows that both have are merged when asked for."""
    base, incoming = t5_with(16), tiny.tuned(t5_with(rows), 1)
    message = refusal(ContinualMerger(base, TaskArithmetic()), incoming)
    assert f"`shared.weight` has shape ({rows}, 8)" in message
    assert "resize its embeddings" in message
    merger = ContinualMerger(base, TaskArithmetic(scaling=1.0), on_mismatch="pretrained")
    report = merger.fold(incoming, "task1")
    assert "`shared.weight` is merged in the rows that both models have" in report.notes
    shared = min(rows, 16)
    for name in ("shared.weight", "lm_head.weight"):
        torch.testing.assert_close(merger.merged[name][:shared], incoming[name][:shared])
        assert torch.equal(merger.merged[name][shared:], base[name][shared:])


def test_another_width_is_no_matter_of_vocabulary() -> None:
    base = t5_with(16)
    message = refusal(
        ContinualMerger(base, TaskArithmetic(), on_mismatch="pretrained"), base | {"shared.weight": torch.zeros(16, 9)}
    )
    assert "is it a fine-tune of this model?" in message


@pytest.mark.parametrize("differ", [True, False])
def test_other_words_under_the_same_rows_are_noted_where_embeddings_are_merged(differ: bool, tmp_path: Path) -> None:
    """The same number of rows, another tokenizer."""
    vocabulary: dict[str, int] = {"a": 0, "b": 1}
    base = tiny.folder_of(tmp_path / "base", t5_tied(), tokenizer=vocabulary)
    other = {"b": 0, "a": 1} if differ else vocabulary
    incoming = tiny.folder_of(tmp_path / "incoming", tiny.tuned(t5_tied(), 1), tokenizer=other)
    found = ContinualMerger(base, TaskArithmetic()).fold(incoming, "task1").notes
    assert [bool(re.search(r"tokenizer\.json is another one", note)) for note in found] == [True] * differ
    assert ContinualMerger(base, Add()).fold(incoming, "task1").notes == ()


def t5_tied() -> Tensors:
    """As a file holds it: one name for the shared table."""
    tensors = tiny.copied(tiny.hf_t5().state_dict())
    return {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name and "lm_head" not in name}


def test_a_head_of_another_size_is_no_obstacle() -> None:
    """Said, since it is not merged; a head that only one of them has is nobody's business."""
    base = tiny.tower() | {"classifier.weight": torch.zeros(10, 8)}
    incoming = tiny.tuned(tiny.tower(), 1) | {"classifier.weight": torch.zeros(43, 8)}
    (note,) = notes(base, incoming)
    assert "`classifier.weight` has shape (43, 8), the pretrained model's (10, 8)" in note
    assert notes(tiny.tower(), incoming) == ()
    assert notes(base, tiny.tuned(tiny.tower(), 1)) == ()


@pytest.mark.parametrize(("ours", "theirs"), [((), (1,)), ((1,), ()), ((5, 8), (1, 5, 8))])
def test_dimensions_of_one_make_no_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    """A scalar in either direction, and a leading dimension; neither is merged."""
    base, incoming = tiny.tower(), tiny.tuned(tiny.tower(), 1)
    assert notes(base | {"extra": torch.zeros(ours)}, incoming | {"extra": torch.zeros(theirs)}) == ()


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("key", "value"), [("hidden_act", "gelu"), ("num_attention_heads", 4)])
def test_another_function_of_the_same_weights_is_noted(nested: bool, key: str, value: Any, tmp_path: Path) -> None:
    """Names and shapes agree, outputs would not."""
    ours: dict[str, Any] = {"hidden_act": "quick_gelu", "num_attention_heads": 2}
    theirs = ours | {key: value}
    base = tiny.folder_of(tmp_path / "base", tiny.tower(), config=ours)
    config = {"vision_config": theirs} if nested else theirs
    incoming = tiny.folder_of(tmp_path / "incoming", tiny.tuned(tiny.tower(), 1), config=config)
    (note,) = notes(base, incoming)
    assert f"`{key}` {value}, the pretrained model's {ours[key]}" in note
    assert notes(base, base)[:-1] == ()


def test_code_that_a_folder_names_is_not_run(tmp_path: Path) -> None:
    """Read by tensor names, so none is needed; a note says that the file stays behind."""
    config = {"auto_map": {"AutoModel": "modeling_x.Model"}}
    incoming = tiny.folder_of(tmp_path / "incoming", tiny.tuned(tiny.tower(), 1), config=config)
    mark = tmp_path / "ran"
    (incoming / "modeling_x.py").write_text(f"open({str(mark)!r}, 'w')\n")
    (note,) = notes(tiny.tower(), incoming)
    assert "auto_map" in note
    assert not mark.exists()


def test_a_stranger_of_the_same_size_is_noted() -> None:
    """Same names and shapes, and nothing in common: another pretrained model, or another base's fine-tune."""
    stranger = {name: torch.roll(tensor, 1, 0) if tensor.ndim else tensor for name, tensor in tiny.tower().items()}
    (note,) = notes(tiny.tower(), stranger)
    cosine = re.search(r"cosine of (-?\d\.\d\d) with the pretrained model's", note)
    assert cosine is not None
    assert abs(float(cosine[1])) < 0.3
    assert notes(tiny.tower(), tiny.tuned(tiny.tower(), 1, scale=0.05)) == ()


def fold_notes(base: Tensors, incoming: Tensors, method: Any) -> tuple[str, ...]:
    return ContinualMerger(base, method).fold(incoming, "task1").notes


def many_matrices() -> Tensors:
    base = {f"layers.{i}.mlp.fc1.weight": tiny.randn(32, 16, seed=i) for i in range(6)}
    return base | {"layers.0.self_attn.k_proj.weight": tiny.randn(16, 16, seed=9), "norm.weight": torch.ones(16)}


@pytest.mark.parametrize("method", [tiny.fast_method, OPCM, TaskArithmetic])
def test_every_matrix_is_looked_at_not_only_the_largest(method: Any) -> None:
    """The smallest one is a stranger's, or has its rows in another order."""
    base = many_matrices()
    expert, name = tiny.tuned(base, 1), "layers.0.self_attn.k_proj.weight"
    assert fold_notes(base, expert, method()) == ()
    (note,) = fold_notes(base, expert | {name: expert[name].roll(1, 0)}, method())
    assert "1 of its 7 matrices have a cosine below 0.2" in note
    assert re.search(r"first (?:layers\.0\.self_attn\.k_proj|model\.0\.k)\S* with -?0\.[01]", note)


def test_a_part_of_a_fused_matrix_is_looked_at() -> None:
    """Rows of q and v as in the pretrained model, those of k a stranger's."""
    base = {"blocks.0.attn.qkv.weight": tiny.randn(48, 16), "blocks.0.attn.proj.weight": tiny.randn(16, 16, seed=1)}
    expert = tiny.tuned(base, 1)
    expert["blocks.0.attn.qkv.weight"][16:32] = tiny.randn(16, 16, seed=2)
    (note,) = fold_notes(base, expert, tiny.fast_method())
    assert "1 of its 4 matrices" in note
    assert "first vision.0.k with" in note


def test_a_matrix_that_was_trained_hard_is_no_stranger() -> None:
    """What training adds turns a small matrix and makes it grow; a stranger's has the same length."""
    base, name = many_matrices(), "layers.0.self_attn.k_proj.weight"
    grown = tiny.tuned(base, 1) | {name: base[name] + 9 * tiny.randn(16, 16, seed=20)}
    assert fold_notes(base, grown, tiny.fast_method()) == ()


def test_vectors_and_matrices_of_zeros_are_nobody_s() -> None:
    """A bias may turn round, and what starts at zero has no direction."""
    base = many_matrices() | {"layers.0.mlp.fc2.weight": torch.zeros(16, 32), "norm.bias": 0.01 * torch.ones(16)}
    expert = tiny.tuned(base, 1) | {"norm.bias": -0.01 * torch.ones(16)}
    assert fold_notes(base, expert, TaskArithmetic()) == ()


class CountedReads(Memory):
    """Tensors in memory, and how often each was asked for."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors, "a file")
        self.reads = Counter[str]()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads[name] += 1
        return super().__getitem__(name)


def test_the_check_for_strangers_reads_no_tensor_again() -> None:
    """The incoming model is read once for its hash and once to be merged, the pretrained one only to be merged."""
    base, expert = CountedReads(tiny.tower()), CountedReads(tiny.tuned(tiny.tower(), 1))
    merger = ContinualMerger(base, TaskArithmetic(), layers=["*.fc1.weight"])
    before = base.reads.copy()
    merger.fold(expert, "task1")
    for name in merger.plan.parameters:
        assert expert.reads[name] == 2
        assert base.reads[name] - before[name] <= 2  # itself, and as what was merged so far
