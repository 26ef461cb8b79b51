"""Ties-Merging in small numbers."""

import pytest
import torch
from rivals import flat, states_of
from tiny import Tensors, assert_same, randn
from torch import nn

from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import TiesMerging
from safemerge_pl.methods.ties import elect_and_sum, trim_thresholds
from safemerge_pl.runtime import cores

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("size", "top_k", "kept"),
    [(1000, 0.2, 201), (1000, 0.001, 2), (1000, 0.0005, 1), (1000, 1.0, 1000), (7, 0.5, 4), (1, 0.2, 1)],
)
def test_trimming_keeps_one_more_than_the_share(size: int, top_k: float, kept: int) -> None:
    """n + 1 entries survive where no two are equal."""
    sizes = torch.randperm(size, generator=torch.Generator().manual_seed(0)) + 1.0
    for kind in (torch.float32, torch.float64):
        pair = [sizes.to(kind), -0.1 * sizes.to(kind)]
        parts = list(zip(*(tensor.split(max(size // 3, 1)) for tensor in pair), strict=True))
        limits = trim_thresholds(lambda look, parts=parts: [look(iter([part])) for part in parts], top_k)
        for tensor, limit in zip(pair, limits, strict=True):
            assert (tensor.abs() >= limit).sum() == kept
            assert limit == tensor.abs().kthvalue(size - kept + 1).values


def test_ties_keeps_201_of_1000_entries_over_the_whole_model() -> None:
    """The same task twice: the accumulated vector has the same largest entries, so exactly those grow."""
    shapes = {"a.weight": (20, 30), "b.bias": (100,), "c": (300,)}
    pretrained = {name: torch.zeros(shape) for name, shape in shapes.items()}
    task = {name: (i + 1) * randn(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    merger = ContinualMerger(pretrained, TiesMerging())
    first, second = states_of(merger, [task, task])
    assert (flat(first) != 0).all()
    grown = flat(first) != flat(second)
    assert grown.sum() == 201
    assert flat(task).abs()[grown].min() > flat(task).abs()[~grown].max()
    assert merger.reports[0].kept_fraction == 1.0
    assert merger.reports[1].kept_fraction * 1000 == pytest.approx(201)


def test_ties_does_not_depend_on_the_parts_it_works_in(
    clip: tuple[nn.Module, list[Tensors]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = states_of(ContinualMerger(clip[0], TiesMerging()), clip[1])
    monkeypatch.setattr(cores, "_FLAT_PART", 7)
    for found, expected in zip(states_of(ContinualMerger(clip[0], TiesMerging()), clip[1]), whole, strict=True):
        assert_same(found, expected)


def test_election_takes_the_sign_of_the_sum_and_the_majority_where_it_is_zero() -> None:
    pair = torch.tensor([[3.0, -1.0, 2.0, 0.0, 5.0, -4.0], [1.0, -2.0, -3.0, 0.0, -5.0, 4.0]])
    assert elect_and_sum(pair, 1.0).tolist() == [4, -3, -3, 0, 5, 4]
    assert elect_and_sum(pair, -1.0).tolist() == [4, -3, -3, 0, -5, -4]
    assert elect_and_sum(pair, 0.0).tolist() == [4, -3, -3, 0, 0, 0]


@pytest.mark.parametrize(("sign", "expected"), [(1.0, 4.0), (-1.0, 0.0)])
def test_majority_is_that_of_the_whole_model(sign: float, expected: float) -> None:
    """The coordinate in ``a`` cancels; the tensor ``b`` decides."""
    pretrained = {"a": torch.zeros(1), "b": torch.zeros(3)}
    stream = [{"a": torch.tensor([value]), "b": torch.full((3,), sign)} for value in (2.0, -2.0)]
    merged = states_of(ContinualMerger(pretrained, TiesMerging(scaling=1.0, top_k=1.0)), stream)[-1]
    assert merged["a"].tolist() == [expected]
    assert merged["b"].tolist() == [3 * sign] * 3
