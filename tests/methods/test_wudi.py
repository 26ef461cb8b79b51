"""WUDI-Merging in small numbers."""

import pytest
import reference_methods as twins
import torch
from tiny import randn

from safemerge_pl.methods import Stack, WUDIMerging
from safemerge_pl.methods.wudi import wudi_loss_and_gradient

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 6)])
def test_wudi_gram_form_equals_the_literal_one(shape: tuple[int, int]) -> None:
    """Gram matrices in the place of products as large as the output side."""
    vectors = randn(2, 3, *shape, seed=1).double()
    grams = vectors.mT @ vectors / vectors.square().sum((2, 3), keepdim=True)
    moved, start = randn(3, *shape, seed=2).double(), vectors.sum(0)
    losses, gradient = wudi_loss_and_gradient(moved, vectors[1] @ grams[0] + vectors[0] @ grams[1], grams.sum(0))
    for layer in range(3):
        leaf = (start + moved)[layer].clone().requires_grad_()
        loss = twins.wudi_objective(leaf, list(vectors[:, layer]))
        loss.backward()
        first = twins.wudi_objective(start[layer], list(vectors[:, layer]))
        assert losses[layer].item() == pytest.approx((loss - first).item(), rel=1e-12)
        assert torch.allclose(gradient[layer], leaf.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wudi_skips_the_term_of_an_empty_vector(dtype: torch.dtype) -> None:
    """Its size would be divided by, 0/0. With one vector left the start is its minimum, with none nothing moves."""
    pretrained = (0.05 * randn(4, 6, 5)).to(dtype)
    merged, incoming = (pretrained + (0.01 * randn(4, 6, 5, seed=seed)).to(dtype) for seed in (1, 2))
    merged[1], incoming[2] = pretrained[1], pretrained[2]
    merged[3] = incoming[3] = pretrained[3]
    stack = Stack(("a", "b", "c", "d"), 2, pretrained, merged, incoming)
    result = WUDIMerging().fold_stack(stack)
    assert result.losses is not None
    assert result.losses[:, 0].all()
    assert not result.losses[:, 1:].any()
    for layer, expected in ((1, incoming), (2, merged), (3, pretrained)):
        assert torch.allclose(result.merged[layer], expected[layer], rtol=0, atol=1e-7)
    alone = Stack(("a",), 2, pretrained[:1], merged[:1], incoming[:1])
    assert torch.equal(result.merged[0], WUDIMerging().fold_stack(alone).merged[0])
