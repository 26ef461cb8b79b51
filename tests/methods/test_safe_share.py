"""SAFE-Share against its literal definition, by hand, and what it must be in the limit of its settings."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import FLOAT32_EPS, FLOAT64_EPS, ShareSettings, safe_share
from tiny import folder_of, randn, tower, tuned
from torch import Tensor

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import SafeShare, Stack

SHAPES = [(8, 8), (16, 8), (6, 12)]


def stream(shape: tuple[int, int], tasks: int = 4, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A pretrained matrix with a falling spectrum, and fine-tunes whose changes share two directions."""
    theta0 = randn(*shape, seed=seed) @ torch.diag(0.7 ** torch.arange(shape[1]))
    common = randn(2, shape[1], seed=seed + 1)
    return theta0, [
        theta0 + 0.1 * randn(shape[0], 2, seed=seed + 10 + t) @ common + 0.02 * randn(*shape, seed=seed + 50 + t)
        for t in range(tasks)
    ]


def fold(method: SafeShare, theta0: Tensor, incoming: list[Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The accumulated vector after every task; layers whose task is zero are not counted, as the merger does it."""
    base = theta0.to(dtype)[None]
    merged, count, found = base, 0, []
    for index, theta in enumerate(incoming, 1):
        count += bool((theta != theta0).any())
        stack = Stack(("vision.0.q",), index, base, merged, theta.to(dtype)[None], counts=(count,))
        merged = method.fold_stack(stack).merged
        found.append((merged - base)[0])
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_mask": False},
        {"shared_rank": 0},
        {"keep_ratio": 0.3, "shared_rank": 6},
        {"keep_ratio": 1.0},
        {"keep_ratio": 0.0},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_streams_equal_the_literal_definition(
    shape: tuple[int, int], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    theta0, incoming = stream(shape)
    theta0, incoming = theta0.to(dtype), [theta.to(dtype) for theta in incoming]
    options: dict[str, Any] = {"scoring_rank": 2, "shared_rank": 3, **settings}
    eps = FLOAT64_EPS if dtype == torch.float64 else FLOAT32_EPS
    expected = safe_share(theta0, incoming, ShareSettings(**options, rank_eps=eps))
    found = fold(SafeShare(**options), theta0, incoming, dtype)
    for ours, theirs in zip(found, expected, strict=True):
        # weights of size 1 are rounded; what is added to them is a tenth as large
        assert (ours.double() - theirs).norm() <= 1e3 * eps * theta0.double().norm()


def test_without_mask_and_with_full_sharing_it_is_the_mean_of_the_task_vectors() -> None:
    theta0, incoming = stream((8, 8))
    found = fold(SafeShare(use_mask=False, scoring_rank=2, shared_rank=8), theta0, incoming)
    for count, accumulated in enumerate(found, 1):
        mean = torch.stack([theta - theta0 for theta in incoming[:count]]).double().mean(0)
        torch.testing.assert_close(accumulated, mean, rtol=1e-5, atol=1e-7)  # theta was rounded to float32


def test_without_sharing_it_is_the_masked_sum() -> None:
    theta0, incoming = stream((16, 8))
    alone = [fold(SafeShare(scoring_rank=2, shared_rank=0), theta0, [theta])[0] for theta in incoming]
    found = fold(SafeShare(scoring_rank=2, shared_rank=0), theta0, incoming)
    torch.testing.assert_close(found[-1], torch.stack(alone).sum(0))


def test_the_first_task_is_masked_and_nothing_else() -> None:
    theta0, (theta, *_) = stream((8, 8))
    (found,) = fold(SafeShare(keep_ratio=0.5, scoring_rank=2, shared_rank=3), theta0, [theta])
    kept = found != 0
    assert kept.double().mean() == pytest.approx(0.5, abs=0.02)
    torch.testing.assert_close(found[kept], (theta - theta0).double()[kept], rtol=1e-5, atol=1e-7)


def test_sharing_by_hand() -> None:
    """The accumulated vector uses the first input only: there the mean of 4 and 2, elsewhere the sum."""
    zero = torch.zeros(1, 1, 2)
    method = SafeShare(use_mask=False, scoring_rank=1, shared_rank=1)
    stack = Stack(("x",), 2, zero, torch.tensor([[[4.0, 0.0]]]), torch.tensor([[[2.0, 5.0]]]))
    assert method.fold_stack(stack).merged.tolist() == [[[3.0, 5.0]]]
    third = Stack(("x",), 3, zero, torch.tensor([[[3.0, 0.0]]]), torch.tensor([[[6.0, 1.0]]]))
    assert method.fold_stack(third).merged.tolist() == [[[4.0, 1.0]]]


def test_a_zero_task_changes_nothing_and_does_not_count() -> None:
    theta0, incoming = stream((8, 8))
    method = SafeShare(scoring_rank=2, shared_rank=3)
    with_zero = fold(method, theta0, [incoming[0], theta0, incoming[1]])
    without = fold(method, theta0, incoming[:2])
    assert torch.equal(with_zero[1], with_zero[0])
    assert torch.equal(with_zero[2], without[1])


def test_a_zero_layer_in_a_stack_keeps_its_bits_and_count() -> None:
    theta0, incoming = stream((8, 8))
    base = torch.stack([theta0, theta0])
    merged = torch.stack([incoming[0], incoming[0]])
    stack = Stack(("a", "b"), 3, base, merged, torch.stack([theta0, incoming[1]]), counts=(1, 2))
    method = SafeShare(scoring_rank=2, shared_rank=3)
    found = method.fold_stack(stack).merged
    assert torch.equal(found[0], merged[0])
    alone = method.fold_stack(Stack(("b",), 2, base[1:], merged[1:], incoming[1][None], counts=(2,))).merged
    torch.testing.assert_close(found[1], alone[0])


def test_what_all_tasks_share_is_counted_once() -> None:
    """Equal task vectors: the sum grows with the stream, the shared vector does not."""
    theta0, (theta, *_) = stream((8, 8))
    shared = fold(SafeShare(scoring_rank=2, shared_rank=8), theta0, [theta] * 5)
    summed = fold(SafeShare(scoring_rank=2, shared_rank=0), theta0, [theta] * 5)
    assert shared[-1].norm() == pytest.approx(shared[0].norm())
    assert summed[-1].norm() == pytest.approx(5 * summed[0].norm())


def test_ranks_may_be_shares_of_the_width() -> None:
    theta0, incoming = stream((16, 8))
    share, number = SafeShare(scoring_rank=0.25, shared_rank=0.5), SafeShare(scoring_rank=2, shared_rank=4)
    for ours, theirs in zip(fold(share, theta0, incoming), fold(number, theta0, incoming), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_ratio": 1.5}, "`keep_ratio` must be in"),
        ({"keep_ratio": math.nan}, "`keep_ratio` must be in"),
        ({"scoring_rank": 0}, "`scoring_rank` must be a whole number of at least 1"),
        ({"scoring_rank": 2.5}, "`scoring_rank` must be a whole number"),
        ({"scoring_rank": math.inf}, "`scoring_rank` must be a whole number"),
        ({"shared_rank": -1}, "`shared_rank` must be a whole number of at least 0"),
        ({"shared_rank": math.nan}, "`shared_rank` must be a whole number"),
        ({"shared_rank": True}, "`shared_rank` must be a whole number"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SafeShare(**settings)


@pytest.mark.parametrize("name", ["scoring_rank", "shared_rank"])
def test_a_rank_above_the_width_is_refused_with_the_remedy(name: str) -> None:
    theta0, incoming = stream((8, 8))
    with pytest.raises(ValueError, match=f"`{name}` is 9, but vision.0.q has only 8 input directions; give a share"):
        fold(SafeShare(**{"scoring_rank": 2, "shared_rank": 2, name: 9}), theta0, incoming)


def test_a_rank_is_compared_with_every_width_before_anything_is_read() -> None:
    wide, narrow = "layers.0.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight"
    theta0 = {wide: torch.eye(8), narrow: torch.full((4, 4), math.nan)}
    with pytest.raises(ValueError, match=r"`shared_rank` is 5, but .*1\.q has only 4 input directions"):
        ContinualMerger(theta0, SafeShare(scoring_rank=2, shared_rank=5))


def test_a_merge_is_not_continued_with_another_setting(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", tower(), config={"model_type": "clip_vision_model"})
    merger = ContinualMerger(base, SafeShare(scoring_rank=2, shared_rank=3))
    merger.fold(tuned(tower(), 1), "a")
    merger.save(tmp_path / "out")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(CheckpointError, match=r"other settings \(shared_rank: 3 then, 2 now\); use the same ones"):
        ContinualMerger.load(tmp_path / "out", base, method=SafeShare(scoring_rank=2, shared_rank=2))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    again = ContinualMerger.load(tmp_path / "out", base)
    assert (again.method, again.tasks, again.max_response) == (merger.method, ["a"], 0.035)
