"""A further type of adapter takes an entry in the table of types, and nothing else."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.checkpoints.adapter_types import ADAPTER_TYPES, AdapterType, FactorKind
from safemerge_pl.merger import ContinualMerger


def hadamard(factors: Mapping[str, Tensor]) -> Tensor:
    """The update of LoHa (Hyeon-Woo et al. 2022): the elementwise product of two products of low rank."""
    first, second = (factors[f"hada_{part}_a"] @ factors[f"hada_{part}_b"] for part in ("w1", "w2"))
    return first * second


LOHA = AdapterType(
    alpha="alpha",
    settings=frozenset({"alpha", "init_weights"}),
    kinds=(
        FactorKind(
            factors=("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
            ranked="hada_w1_b",
            shape=lambda shapes: (shapes["hada_w1_a"][0], shapes["hada_w1_b"][1]),
            update=hadamard,
        ),
    ),
)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of peft
def test_a_type_that_is_entered_in_the_table_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    base = tiny.copied(tiny.hf_vision().state_dict())
    wrapped = peft.get_peft_model(
        tiny.hf_vision(), peft.LoHaConfig(r=2, alpha=6, target_modules=["q_proj", "fc1"], init_weights=False)
    )
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="adapter of type LOHA, only LORA is read"):
        ContinualMerger(base, tiny.Add()).fold(tmp_path, task="a")
    monkeypatch.setitem(ADAPTER_TYPES, "LOHA", LOHA)
    merger = ContinualMerger(base, tiny.Add())
    merger.fold(tmp_path, task="a")
    expected = wrapped.merge_and_unload().state_dict()
    assert sum(not torch.equal(merger.merged[name], base[name]) for name in base) == 4
    for name, tensor in merger.merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    _cut(tmp_path, "hada_w2_b")
    with pytest.raises(CheckpointError, match="has only"):
        ContinualMerger(base, tiny.Add()).fold(tmp_path, task="a")


def _cut(folder: Path, ending: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}
    save_file(kept, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", ADAPTER_TYPES["LORA"].kinds, ids=["linear", "embedding"])
@pytest.mark.parametrize(("rank", "shape"), [(2, (4, 3)), (3, ())])
def test_factors_of_two_ranks_have_no_product(kind: FactorKind, rank: int, shape: tuple[int, ...]) -> None:
    up, down = kind.factors
    assert kind.ranked == down
    assert kind.shape({up: (4, 2), down: (rank, 3)}) == shape
    if shape:
        assert kind.update({up: torch.ones(4, 2), down: torch.ones(rank, 3)}).shape == shape


def test_a_convolution_s_factors_make_a_flat_matrix() -> None:
    """Down is a convolution, up one of a single pixel, as peft has them."""
    up, down = torch.randn(4, 2, 1, 1), torch.randn(2, 3, 5, 5)
    kind = ADAPTER_TYPES["LORA"].kinds[0]
    assert kind.shape({"lora_B": (4, 2, 1, 1), "lora_A": (2, 3, 5, 5)}) == (4, 3, 5, 5)
    expected = torch.einsum("or,rikl->oikl", up[..., 0, 0], down).flatten(1)
    torch.testing.assert_close(kind.update({"lora_B": up, "lora_A": down}), expected)
