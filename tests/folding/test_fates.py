"""Shares of the squared task vector: by hand on a small case, and the same however a fold is done."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tiny import Add, tower, tuned

from safemerge_pl.architectures.groups import FATES
from safemerge_pl.folding.fates import GroupShares, Taken, add_up, in_words, total
from safemerge_pl.folding.report import FoldReport
from safemerge_pl.maths.linalg import right_singular_basis
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import NUFILT, OPCM, MergeMethod, SafeMerge, SafeShare, Stack, TaskArithmetic, TiesMerging

UP, HEAD, BIAS = "layers.0.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"


def test_by_hand() -> None:
    """The change is 3, 4 in the matrix, 1 in the norm and 7, 5 in the head: 25 + 1 + 74 = 100 squared."""
    base = {UP: torch.eye(2), HEAD: torch.eye(2), BIAS: torch.ones(2)}
    incoming = {name: tensor.clone() for name, tensor in base.items()}
    incoming[UP] += torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    incoming[HEAD] += torch.tensor([[7.0, 5.0], [0.0, 0.0]])
    incoming[BIAS] += torch.tensor([1.0, 0.0])
    report = ContinualMerger(base, Add()).fold(incoming, "a")
    assert report.shares == (
        GroupShares("feed-forward in", merged=0.25),
        GroupShares("norms and biases", pretrained=0.01),
        GroupShares("head", pretrained=pytest.approx(0.74)),
    )
    (note,) = [note for note in report.notes if "head" in note]
    assert (
        "its head was trained (74.0% of the squared task vector) and stays pretrained, first `lm_head.weight`" in note
    )
    assert 'rest="keep"' in note
    assert in_words(report.shares) in str(report)


def test_a_mask_and_what_recovery_makes_up_for() -> None:
    """The definitions in the docstring, written out for one matrix."""
    torch.manual_seed(0)
    base, tau = torch.randn(1, 6, 5), torch.randn(1, 6, 5)
    stack = Stack(("x.0.up",), 1, base, base, base + tau)
    settings = {"keep_ratio": 0.5, "scoring_rank": 2, "task_rank": 2, "recovery_rank": 2, "lr": 0.05}
    tau = stack.task_vector
    kept = SafeMerge(**settings, use_recovery=False).fold_stack(stack).merged - base
    result = SafeMerge(**settings).fold_stack(stack)
    correction, basis = result.merged - base - kept, right_singular_basis(tau, 2)
    lost = tau - kept
    regained = (lost @ basis).square().sum() - ((lost - correction) @ basis).square().sum()
    assert result.taken is not None
    assert result.recovered is not None
    assert result.taken.item() == pytest.approx((kept.square().sum() / tau.square().sum()).item(), rel=1e-5)
    assert result.recovered.item() == pytest.approx((regained / tau.square().sum()).item(), rel=1e-3)
    assert result.recovered.item() > 0.01


METHODS = [
    SafeMerge(scoring_rank=2, recovery_rank=2, task_rank=1, num_steps=2),
    SafeShare(scoring_rank=2, shared_rank=2),
    NUFILT(null_rank=2, recovery_rank=2, task_rank=1, num_steps=2),
    OPCM(),
    TiesMerging(),
    TaskArithmetic(),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
def test_they_add_up_to_one_for_every_method(method: MergeMethod, tmp_path: Path) -> None:
    """In memory and from disk, and as a ledger and a state keep them."""
    base = tower() | {HEAD: torch.ones(3, 8)}
    found = []
    for workspace in (None, tmp_path / "work"):
        merger = ContinualMerger(base, method, workspace=workspace)
        for seed in (1, 2):
            incoming = tuned(base, seed)
            report = merger.fold(incoming, f"task{seed}")
        shares = [getattr(group, fate) for group in report.shares for fate in FATES]
        assert math.fsum(shares) == pytest.approx(1)
        assert all(0 <= share <= 1 for share in shares)
        assert total(report.shares).whole == pytest.approx(1)
        assert (total(report.shares).pretrained == 0) == method.merges_rest
        assert FoldReport.from_dict(asdict(report)) == report
        found.append(report.shares)
    assert found[0] == found[1]


def test_a_report_of_an_earlier_version_has_none() -> None:
    report = ContinualMerger(tower(), Add()).fold(tuned(tower(), 1), "a")
    values = asdict(report)
    del values["shares"], values["leading"]
    for layer in values["layers"]:
        del layer["taken"], layer["recovered"]
    earlier = FoldReport.from_dict(values)
    assert (earlier.shares, earlier.leading, earlier.layers[0].taken) == ((), None, None)
    assert "squared" not in str(earlier)
    assert earlier.table().row_count == 0
    with pytest.raises(ValueError, match="`merged` is 'much'"):
        FoldReport.from_dict({**asdict(report), "shares": [{**asdict(report.shares[0]), "merged": "much"}]})


def test_nothing_changed_and_what_is_not_finite() -> None:
    """Only what is merged must be finite; the rest is passed over with a note."""
    assert add_up([Taken(UP, 0.0, 1.0, 0.0)], {HEAD: 0.0}) == ()
    base = tower() | {HEAD: torch.ones(3, 8)}
    incoming = tuned(tower(), 1) | {HEAD: torch.full((3, 8), float("nan"))}
    report = ContinualMerger(base, Add()).fold(incoming, "a")
    assert any("`lm_head.weight` has NaN or Inf; it is not merged" in note for note in report.notes)
    assert math.isfinite(total(report.shares).whole)


def test_rounding_is_no_change() -> None:
    base = tower() | {HEAD: torch.full((3, 8), 1.0001)}
    incoming = tuned(tower(), 1) | {HEAD: torch.full((3, 8), 1.0001).bfloat16()}
    report = ContinualMerger(base, Add()).fold(incoming, "a")
    assert not [group for group in report.shares if group.group == "head"]
