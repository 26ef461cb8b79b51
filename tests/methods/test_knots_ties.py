"""KnOTS with Ties in small numbers."""

import pytest
import torch
from tiny import randn

from safemerge_pl.methods import KnOTSTies, Stack

pytestmark = pytest.mark.usefixtures("one_thread")


def test_knots_without_trimming_and_conflict_adds_both_vectors() -> None:
    """Rows of ``V`` on disjoint inputs, each of one sign, so both blocks agree everywhere."""
    rows = torch.zeros(3, 16, dtype=torch.float64)
    for row, sign in enumerate((1, -1, 1)):
        for seed, block in enumerate(rows.view(3, 2, 8).unbind(1)):
            block[row, row::3] = sign * (0.1 + randn(8, seed=10 * row + seed).double().abs())[row::3]
    rows /= rows.norm(dim=1, keepdim=True)
    u = torch.linalg.qr(randn(6, 3, seed=9).double()).Q
    both = u @ torch.diag(torch.tensor([0.5, 0.2, 0.1], dtype=torch.float64)) @ rows
    pretrained = randn(6, 8, seed=4).double()
    stack = Stack(("x",), 2, pretrained[None], (pretrained + both[:, :8])[None], (pretrained + both[:, 8:])[None])
    expected = stack.merged + 0.7 * (stack.merged_vector + stack.task_vector)
    found = KnOTSTies(scaling=0.7, top_k=1.0).fold_stack(stack).merged
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    # with conflict or trimming it does not
    turned = Stack(("x",), 2, pretrained[None], stack.merged, (pretrained - both[:, 8:])[None])
    expected = turned.merged + 0.7 * (turned.merged_vector + turned.task_vector)
    assert not torch.allclose(KnOTSTies(scaling=0.7, top_k=1.0).fold_stack(turned).merged, expected, atol=1e-3)
    assert not torch.allclose(KnOTSTies(scaling=0.7, top_k=0.1).fold_stack(stack).merged, expected, atol=1e-3)


def test_knots_drops_components_below_its_absolute_limit() -> None:
    """Tiny vectors lose everything and add nothing; a layer beside them is not affected."""
    pretrained = torch.zeros(2, 6, 4)
    changes = [torch.stack([1e-6 * randn(6, 4, seed=seed), randn(6, 4, seed=seed)]) for seed in (1, 2)]
    stack = Stack(("a", "b"), 2, pretrained, changes[0], changes[1])
    merged = KnOTSTies().fold_stack(stack).merged
    assert torch.equal(merged[0], changes[0][0])
    assert not torch.equal(merged[1], changes[0][1])
    lower = KnOTSTies(min_singular_value=1e-9).fold_stack(stack).merged
    assert not torch.equal(lower[0], changes[0][0])
    assert torch.equal(lower[1], merged[1])
