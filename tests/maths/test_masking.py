"""Risk and mask by hand, the quantile against its formula, and its edges."""

import numpy
import pytest
import torch
from reference import FLOAT32_EPS, Settings
from reference import general_basis as reference_general_basis
from reference import mask as reference_mask
from reference import risk as reference_risk
from reference import task_basis as reference_task_basis
from torch import Tensor

from safemerge_pl.maths.linalg import complement_basis, right_singular_basis
from safemerge_pl.maths.masking import keep_mask, risk_score


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[None, :, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_risk_by_hand(dtype: torch.dtype) -> None:
    # Eq. 6. Q0 = (3, 4)/5, Qnew = (4, -3)/5, tau = (5, 10): tau Q0 Q0^T = 11 (3, 4)/5 = (6.6, 8.8) and
    # tau Qnew Qnew^T = -2 (4, -3)/5 = (-1.6, 1.2). R = (43.56 - 2.56, 77.44 - 1.44) = (41, 76).
    tau = torch.tensor([[[5.0, 10.0]]], dtype=dtype)
    q0, q_new = column(0.6, 0.8).to(dtype), column(0.8, -0.6).to(dtype)
    risk = risk_score(tau, q0, q_new)
    assert risk.dtype == dtype
    few_roundings = 50 * torch.finfo(dtype).eps  # a dozen operations on numbers of one size
    assert risk.flatten().tolist() == pytest.approx([41.0, 76.0], rel=few_roundings)
    # Eq. 4 is the first square alone; half the weight takes away half of the second.
    assert risk_score(tau, q0, None, 0.0).flatten().tolist() == pytest.approx([43.56, 77.44], rel=few_roundings)
    assert risk_score(tau, q0, q_new, 0.5).flatten().tolist() == pytest.approx([42.28, 76.72], rel=few_roundings)
    assert tau.tolist() == [[[5.0, 10.0]]]


def test_risk_is_a_sum_over_all_directions_before_the_square() -> None:
    # Q0 = [e1, (e2 + e3)/sqrt 2], tau = (2, 1, 3): the projection is (2, 2, 2), so every entry has risk 4.
    q0 = torch.cat([column(1, 0, 0), column(0, 0.5**0.5, 0.5**0.5)], dim=2)
    risk = risk_score(torch.tensor([[[2.0, 1.0, 3.0]]]).double(), q0, torch.zeros_like(q0))
    assert risk.flatten().tolist() == pytest.approx([4.0, 4.0, 4.0])


def test_risk_without_pretrained_directions_is_what_the_task_loses() -> None:
    # Q0 empty: R = -(tau Qnew Qnew^T)^2 = (-1, 0).
    risk = risk_score(torch.tensor([[[1.0, 2.0]]]).double(), column(0, 0), column(1, 0))
    assert risk.flatten().tolist() == [-1.0, 0.0]


def test_risk_keeps_layers_apart() -> None:
    tau, q0, q_new = randn(3, 5, 4), right_singular_basis(randn(3, 5, 4, seed=1), 2), randn(3, 4, 2, seed=2)
    stacked = risk_score(tau, q0, q_new)
    for layer in range(3):
        literal = reference_risk(tau[layer], q0[layer], q_new[layer], 1.0)
        assert torch.allclose(stacked[layer], literal, rtol=1e-12, atol=1e-12)


def test_task_basis_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"^`task_basis` is needed unless `utility_weight` is 0\.$"):
        risk_score(torch.ones(1, 1, 1), torch.ones(1, 1, 1), None)


def test_tiny_half_precision_task_vector_still_has_distinct_risks() -> None:
    """Entries near 1e-4 that were stored in fp16; their squares underflow there."""
    theta0 = (randn(1, 24, 16) * 0.05).half()
    theta1 = (theta0.float() + 1e-4 * randn(1, 24, 16, seed=1).float()).half()
    tau = theta1.float() - theta0.float()
    q0 = right_singular_basis(theta0.float(), 4)
    risk = risk_score(tau, q0, complement_basis(right_singular_basis(tau, 4), q0))
    assert risk.half().unique().numel() <= 3  # what scoring in the storage dtype would leave: a handful of subnormals
    assert risk.unique().numel() == risk.numel()
    assert keep_mask(risk, 0.5).sum() == 192
    settings = Settings(scoring_rank=4, rank_eps=FLOAT32_EPS)
    literal_q0 = reference_general_basis(theta0[0].double(), settings)
    literal = reference_risk(
        tau[0].double(), literal_q0, reference_task_basis(tau[0].double(), literal_q0, settings), 1.0
    )
    assert torch.allclose(risk[0].double(), literal, rtol=0, atol=1e-5 * literal.abs().max().item())


def test_mask_by_hand() -> None:
    # Eq. 7. Sorted: -1 0 2 4 9, so the quantiles at 0, 0.25, 0.5, 1 are -1, 0, 2, 9; at 0.4 it is 0.6 * 2 = 1.2.
    risk = torch.tensor([[[4.0, -1.0, 0.0, 9.0, 2.0]]])
    kept = {rho: keep_mask(risk, rho).long().flatten().tolist() for rho in (0.0, 0.25, 0.4, 0.5, 1.0)}
    assert kept == {
        0.0: [0, 1, 0, 0, 0],
        0.25: [0, 1, 1, 0, 0],
        0.4: [0, 1, 1, 0, 0],
        0.5: [0, 1, 1, 0, 1],
        1.0: [1, 1, 1, 1, 1],
    }


def test_reversed_mask_by_hand() -> None:
    # The same budget from the other end: 9, then 4, then 2.
    risk = torch.tensor([[[4.0, -1.0, 0.0, 9.0, 2.0]]])
    kept = {rho: keep_mask(risk, rho, "high").long().flatten().tolist() for rho in (0.0, 0.25, 0.5, 1.0)}
    assert kept == {0.0: [0, 0, 0, 1, 0], 0.25: [1, 0, 0, 1, 0], 0.5: [1, 0, 0, 1, 1], 1.0: [1, 1, 1, 1, 1]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rho", [0.0, 0.05, 0.3, 0.5, 0.777, 0.95, 1.0])
def test_mask_is_the_interpolated_quantile_formula(rho: float, dtype: torch.dtype) -> None:
    risk = randn(3, 11, 7, dtype=dtype)
    for keep in ("low", "high"):
        mask = keep_mask(risk, rho, keep)
        assert mask.shape == risk.shape
        assert mask.dtype == torch.bool
        for layer in range(3):
            assert torch.equal(mask[layer], reference_mask(risk[layer].double(), Settings(keep_ratio=rho, keep=keep)))


@pytest.mark.parametrize("rho", [0.1, 0.3, 0.5, 0.9])
def test_each_layer_has_its_own_quantile(rho: float) -> None:
    """A layer with a thousand times the risk keeps as many entries as the others."""
    risk = randn(1, 10, 10).repeat(3, 1, 1) * torch.tensor([1.0, 1e3, 1e-3]).double()[:, None, None]
    mask = keep_mask(risk, rho)
    assert torch.equal(mask[0], mask[1])
    assert torch.equal(mask[0], mask[2])


# 100 intervals: 0.29 * 100 is 28.999999999999996 in floating point, 0.07 * 100 is 7.000000000000001, 0.57 * 100 is
# 56.99999999999999. The quantile is the entry at position 29, 7, 57 (from 0), and 30, 8, 58 entries lie at or below it.
@pytest.mark.parametrize(("rho", "kept"), [(0.29, 30), (0.07, 8), (0.57, 58), (0.285, 29), (0.2999, 30)])
def test_share_of_the_positions_does_not_suffer_from_rounding(rho: float, kept: int) -> None:
    risk = torch.arange(101.0).flip(0).view(1, 1, 101)
    for keep in ("low", "high"):
        assert keep_mask(risk, rho, keep).sum() == kept


@pytest.mark.parametrize(("rho", "shared"), [(0.5, 1), (0.25, 1), (0.3, 0), (0.61, 0)])
def test_low_and_high_complement_each_other(rho: float, shared: int) -> None:
    """Both ends keep everything between them, the boundary entry twice where rho (n - 1) is whole (n - 1 = 44)."""
    risk = randn(1, 9, 5)
    low, high = keep_mask(risk, rho), keep_mask(risk, 1 - rho, "high")
    assert (low | high).all()
    assert (low & high).sum() == shared
    assert keep_mask(risk, rho).sum() == keep_mask(risk, rho, "high").sum()  # Fig. 1: the same budget
    assert risk[keep_mask(risk, rho, "high")].min() > risk[~keep_mask(risk, rho, "high")].max()


@pytest.mark.parametrize("keep", ["low", "high"])
@pytest.mark.parametrize("rho", [0.0, 0.2, 0.5, 0.59, 0.7, 1.0])
def test_ties_are_kept_together(rho: float, keep: str) -> None:
    """60 % of the rows were never trained, so their risk is exactly 0; the kept share follows R <= quantile."""
    tau = randn(1, 20, 6)
    tau[:, 8:] = 0
    risk = risk_score(tau, right_singular_basis(randn(1, 20, 6, seed=1), 3), None, 0.0)
    assert (risk == 0).sum() == 72
    scores = risk[0].numpy() if keep == "low" else -risk[0].numpy()
    expected = (scores <= numpy.quantile(scores, rho)).mean()
    assert keep_mask(risk, rho, keep).double().mean().item() == pytest.approx(expected, abs=1e-12)
    if keep == "low" and rho < 0.6:  # every zero is a tie at the bottom: 0.6 is kept even if nothing is asked for
        assert expected == pytest.approx(0.6)


def test_equal_risks_are_all_kept() -> None:
    """No entry is better than another."""
    assert keep_mask(torch.zeros(2, 3, 3), 0.0).all()
    assert keep_mask(torch.zeros(2, 3, 3), 0.0, "high").all()


def test_single_entry() -> None:
    assert keep_mask(torch.ones(1, 1, 1), 0.0).all()
    assert keep_mask(torch.ones(1, 1, 1), 1.0).all()


def test_layer_above_the_limit_of_torch_quantile() -> None:
    """4097 x 4097 is more than the 2^24 entries some versions of ``torch.quantile`` take."""
    side = 4097
    rank = torch.arange(side * side) * 1_000_003 % side**2  # a permutation: 1000003 is prime and does not divide 4097
    risk = (rank - side * side // 2).float().view(1, side, side)  # centred: float32 holds these whole numbers exactly
    mask = keep_mask(risk, 0.25)
    # n - 1 = 16785408, a quarter of it is 4196352: the quantile is the entry of that rank (from 0).
    assert torch.equal(mask.flatten(), rank <= 4196352)


def test_deterministic_mode_on_cuda_avoids_kthvalue(monkeypatch: pytest.MonkeyPatch) -> None:
    """``kthvalue`` on CUDA raises under deterministic algorithms; played here on the CPU."""
    risk = randn(2, 7, 5)
    expected = keep_mask(risk, 0.3)

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("kthvalue CUDA does not have a deterministic implementation")

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "kthvalue", refuse)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert torch.equal(keep_mask(risk, 0.3), expected)


def test_risk_is_left_alone() -> None:
    risk = randn(1, 4, 4)
    keep_mask(risk, 0.5, "high")
    assert torch.equal(risk, randn(1, 4, 4))


@pytest.mark.parametrize("rho", [-0.1, 1.5, float("nan")])
def test_keep_ratio_out_of_range(rho: float) -> None:
    with pytest.raises(ValueError, match=rf"^`keep_ratio` must be in \[0, 1\], got {rho}\.$"):
        keep_mask(torch.zeros(1, 1, 1), rho)


def test_unknown_end() -> None:
    with pytest.raises(ValueError, match=r"^`keep` must be 'low' or 'high', got 'middle'\.$"):
        keep_mask(torch.zeros(1, 1, 1), 0.5, "middle")  # type: ignore[arg-type]
