"""NUFILT in small numbers."""

import re

import pytest
import reference_methods as twins
import torch
from rivals import TINY_RANKS, states_of
from tiny import randn
from torch import nn

from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import NUFILT, Stack
from safemerge_pl.methods.nufilt import nufilt_loss_and_gradients

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("shape", [(9, 7), (5, 8)])
def test_nufilt_loss_and_gradients_equal_the_literal_ones(shape: tuple[int, int]) -> None:
    """P V_o = 0, so the second term needs ``tau B A V_o`` alone."""
    tau, merged = (randn(2, *shape, seed=seed).double() for seed in (1, 2))
    a, b = randn(2, 3, shape[1], seed=3).double(), randn(2, shape[1], 3, seed=4).double()
    old, new = (
        torch.stack([twins.leading(matrix, rank) for matrix in stack]) for stack, rank in ((merged, 4), (tau, 2))
    )
    target = (tau - merged - (tau - tau @ old @ old.mT)) @ new
    target = torch.cat([target, torch.zeros(2, shape[0], old.shape[2], dtype=target.dtype)], dim=2)
    losses, *gradients = nufilt_loss_and_gradients(tau, a, b, torch.cat([new, old], dim=2), target)
    for layer in range(2):
        leaves = [factor[layer].clone().requires_grad_() for factor in (a, b)]
        loss = twins.nufilt_objective(tau[layer], merged[layer], old[layer], new[layer], *leaves)
        loss.backward()
        assert losses[layer].item() == pytest.approx(loss.item(), rel=1e-12)
        for gradient, leaf in zip(gradients, leaves, strict=True):
            assert gradient.shape[1:] == leaf.shape
            assert torch.allclose(gradient[layer], leaf.grad, rtol=1e-11, atol=1e-11)


def test_nufilt_without_steps_adds_nothing_on_the_old_directions() -> None:
    tau, merged = 0.1 * randn(1, 9, 7, seed=1).double(), 0.1 * randn(1, 9, 7, seed=2).double()
    zero = torch.zeros_like(tau)
    update = NUFILT(**{**TINY_RANKS, "num_steps": 0}).fold_stack(Stack(("x",), 2, zero, merged, tau)).merged - merged
    old = twins.leading(merged[0], 3)
    assert (update[0] @ old).abs().max() < 1e-15
    assert torch.allclose(update[0], tau[0] - tau[0] @ old @ old.T, rtol=0, atol=1e-15)


@pytest.mark.parametrize("shape", [(9, 7), (5, 8), (6, 6)])
def test_nufilt_ranks_above_both_sides_are_clamped(shape: tuple[int, int]) -> None:
    pretrained, merged, incoming = (randn(1, *shape, seed=seed) for seed in (1, 2, 3))
    ranks = ("null_rank", "recovery_rank", "task_rank")
    stack = Stack(("x",), 2, pretrained, merged, incoming)
    found, expected = (NUFILT(**dict.fromkeys(ranks, rank)).fold_stack(stack) for rank in (10_000, min(shape)))
    assert torch.equal(found.merged, expected.merged)


@pytest.mark.parametrize("shape", [(9, 7), (5, 8), (6, 6)])
@pytest.mark.parametrize("null_rank", [3, 100])
def test_nufilt_quirk_filters_the_first_inputs(null_rank: int, shape: tuple[int, int]) -> None:
    """Right vectors of the thin SVD of a zero matrix are the first min(r, o, d) coordinate axes."""
    pretrained, incoming = randn(1, *shape), randn(1, *shape, seed=1)
    stack = Stack(("x",), 1, pretrained, pretrained, incoming)
    rank = min(null_rank, *shape)
    merged = NUFILT(null_rank=null_rank, filter_first=True).fold_stack(stack).merged
    assert torch.equal(merged[:, :, :rank], pretrained[:, :, :rank])
    roundings = 5 * torch.finfo(torch.float32).eps * incoming.abs().max().item()
    assert torch.allclose(merged[:, :, rank:], incoming[:, :, rank:], rtol=0, atol=roundings)
    whole = NUFILT(null_rank=null_rank).fold_stack(stack).merged
    assert torch.allclose(whole, incoming, rtol=0, atol=roundings)


def test_nufilt_acts_on_every_feed_forward_matrix_of_t5(t5: tuple[nn.Module, list[nn.Module]]) -> None:
    """q, k, v, o, wi_0, wi_1 and wo."""
    merger = ContinualMerger(t5[0], NUFILT(**TINY_RANKS))
    pretrained, merged = t5[0].state_dict(), states_of(merger, [model.state_dict() for model in t5[1][:2]])[-1]
    changed = [name for name in merged if not torch.equal(merged[name], pretrained[name])]
    pattern = re.compile(r"(?:Attention\.[qkvo]|DenseReluDense\.(?:wi_[01]|wo))\.weight$")
    assert changed == [name for name in pretrained if pattern.search(name)]
