"""How much of a change lies in leading directions of the pretrained model: it finds the zoo's expert that forgot."""

import pytest
import torch
from tiny import Add, tower, tuned

from safemerge_pl.checkpoints.tensors import Memory
from safemerge_pl.folding.leading import LeadingDirections, standing_out
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.zoo import Zoo


@pytest.fixture(scope="module")
def shares() -> dict[str, float]:
    """Of the zoo's eight experts."""
    zoo = Zoo()
    merger = ContinualMerger(zoo.model, Add())
    leading = LeadingDirections(merger.plan.parameters, merger.pretrained)
    found = {name: leading.share(merger.check(zoo.expert(name), name, values=False)) for name in zoo.tasks()}
    assert None not in found.values()
    return found  # type: ignore[return-value]


def test_on_the_zoo_one_expert_stands_out(shares: dict[str, float]) -> None:
    """Whenever it comes, from the fourth on; and no other does, whatever came before."""
    odd = shares["clipart_category"]
    usual = sorted(share for share in shares.values() if share != odd)
    assert len(usual) == 7
    lowest, highest = usual[:3], usual[-3:]
    assert standing_out(odd, lowest) is not None
    assert standing_out(usual[0], highest) is None
    assert standing_out(usual[0], [odd, *highest]) is None


def test_with_fewer_than_three_before_it_nothing_is_said(shares: dict[str, float]) -> None:
    assert standing_out(0.1, list(shares.values())[:2]) is None
    assert standing_out(0.1, [None, None, 0.5, 0.5]) is None
    assert standing_out(None, [0.5, 0.5, 0.5]) is None


def test_four_matrices_spread_over_the_depth() -> None:
    names = [f"layers.{block}.mlp.up_proj.weight" for block in range(10)]
    model = Memory({name: torch.eye(4) for name in names}, "a mapping")
    looked_at = LeadingDirections([*names, "norm.weight"], Memory({**dict(model), "norm.weight": torch.ones(4)}, "x"))
    assert list(looked_at.layers) == [names[block] for block in (0, 3, 6, 9)]
    assert LeadingDirections([], model).share({}) is None
    assert LeadingDirections(names, model).share(dict(model)) is None  # nothing was changed


def test_a_turned_matrix_is_looked_at_upright() -> None:
    """GPT-2 stores its matrices as inputs x outputs."""
    name = "h.0.mlp.c_fc.weight"
    weight, change = torch.zeros(6, 24), torch.zeros(6, 24)
    weight[0], change[0, 3], change[5, 3] = 1.0, 1.0, 2.0
    leading = LeadingDirections([name], Memory({name: weight, "h.0.mlp.c_proj.weight": torch.zeros(24, 6)}, "x"))
    assert leading.share({name: weight + change}) == pytest.approx(0.2)


def test_a_fold_reports_it() -> None:
    report = ContinualMerger(tower(), Add()).fold(tuned(tower(), 1), "a")
    assert report.leading is not None
    assert 0 < report.leading < 1
    assert "leading directions" in str(report)
