"""Weights that are scored: an expert's in a tower for a while, tied tensors under any name."""

import pytest
import torch
from tiny_text import noisy, t5, weights
from torch import Tensor, nn

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import TaskArithmetic
from safemerge_pl.scoring import expert_weights, swapped_weights

SHARED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def test_a_tied_tensor_is_read_under_any_of_its_names_and_put_in_once() -> None:
    """Files keep one name of a tied tensor, which one depends on who wrote them."""
    model = t5()
    tuned = weights(noisy(model, 1))
    embedding = tuned["shared.weight"]
    for kept in SHARED:
        file = {name: tensor for name, tensor in tuned.items() if name == kept or name not in SHARED}
        found = expert_weights(model, file)
        with swapped_weights(model, found):
            assert torch.equal(model.shared.weight, embedding)  # type: ignore[union-attr]
            assert all(torch.equal(tensor, tuned[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.shared.weight, t5().shared.weight)  # type: ignore[union-attr]
    lacking = {name: tensor for name, tensor in tuned.items() if "embed" not in name and name != "shared.weight"}
    with pytest.raises(CheckpointError, match=r"lacks \d+ of \d+ tensors to merge, first `shared.weight`"):
        expert_weights(model, lacking)


@pytest.mark.parametrize("theirs", SHARED)
@pytest.mark.parametrize("ours", SHARED)
def test_a_shared_embedding_is_merged_under_any_of_its_names(ours: str, theirs: str) -> None:
    """Of the pretrained and of the incoming model."""
    pretrained, tuned = weights(t5()), weights(noisy(t5(), 1))

    def file(tensors: dict[str, Tensor], kept: str) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name == kept or name not in SHARED}

    merger = ContinualMerger(file(pretrained, ours), TaskArithmetic(scaling=1.0))
    merger.fold({f"module.{name}": tensor for name, tensor in file(tuned, theirs).items()}, "one")
    torch.testing.assert_close(merger.merged[ours], tuned["shared.weight"])


def test_an_expert_that_untied_its_head_is_refused() -> None:
    """A head that the pretrained model does not have must not be lost in silence."""
    tied, untied = t5(own_head=False), weights(noisy(t5(), 1))
    with pytest.raises(CheckpointError, match=r"`lm_head.weight` differs from `shared.weight`, which the pretrained"):
        expert_weights(tied, untied)
    with pytest.raises(CheckpointError, match=r"lacks 1 of \d+ tensors to merge, first `lm_head.weight`"):
        expert_weights(t5(), {name: tensor for name, tensor in untied.items() if name != "lm_head.weight"})


def test_weights_return_whatever_happens() -> None:
    model = nn.Linear(2, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def breaks() -> None:
        with swapped_weights(model, {"weight": torch.ones(1, 2)}):
            assert torch.equal(model.weight, torch.ones(1, 2))
            assert torch.equal(model.bias, before["bias"])
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        breaks()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
