"""How strongly pretrained matrices read an update: by hand, against the literal form, and the scale of the bound."""

import math

import pytest
import torch
from reference import response
from tiny import randn

from safemerge_pl.maths.response import bounded_scale, limit_drift, read_energy


@pytest.mark.parametrize("shape", [(8, 8), (16, 8), (6, 12)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_energies_equal_the_literal_form(shape: tuple[int, int], dtype: torch.dtype, bound: float) -> None:
    w0, a = randn(3, *shape, seed=1).to(dtype), 0.01 * randn(3, *shape, seed=2).to(dtype)
    found = math.sqrt(read_energy(a, w0).sum() / read_energy(w0, w0).sum())
    assert found == pytest.approx(response(list(a), list(w0)), rel=bound)


def test_nothing_is_read_of_what_is_orthogonal_to_the_rows() -> None:
    w0 = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]])
    a = torch.tensor([[[0.0, 0.0, 5.0], [0.0, 0.0, 7.0]]])
    assert read_energy(a, w0).item() == 0
    high = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]])
    assert read_energy(torch.tensor([[[0.0, 5.0], [0.0, 7.0], [0.0, 1.0]]]), high).item() == 0


def test_energy_grows_with_the_square_of_the_update() -> None:
    w0, a = randn(1, 8, 4, seed=1), randn(1, 8, 4, seed=2)
    assert read_energy(3 * a, w0).item() == pytest.approx(9 * read_energy(a, w0).item(), rel=1e-5)


@pytest.mark.parametrize("response_", [0.036, 0.07, 1.0, 123.4, 1e9])
def test_the_bound_holds_to_the_last_bit(response_: float) -> None:
    scale = bounded_scale(response_, 0.035)
    assert scale * response_ <= 0.035
    assert scale == pytest.approx(0.035 / response_, abs=2**-20)
    assert float(torch.tensor(scale)) == scale  # no rounding in float32


@pytest.mark.parametrize("response_", [0.0, 0.01, 0.035])
def test_below_the_bound_nothing_is_scaled(response_: float) -> None:
    assert bounded_scale(response_, 0.035) == 1.0
    assert bounded_scale(1e9, None) == 1.0


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 2.6, 4.0])
@pytest.mark.parametrize("bound", [1e-6, 0.01, 0.4])
def test_a_drift_of_any_power_is_met_in_a_few_trials(power: float, bound: float) -> None:
    trials: list[float] = []

    def drift_at(scale: float) -> float:
        trials.append(scale)
        return 0.9 * scale**power / (1 + scale)  # it flattens

    scale, drift = limit_drift(drift_at, bound, 1.0)
    assert drift == drift_at(scale) <= bound
    coarse = scale * 2**20 < 50  # there the scale's steps are
    assert drift > 0.9 * bound or coarse
    assert len(trials) <= (21 if coarse else 8)
    assert scale * 2**20 == int(scale * 2**20)


def test_a_drift_that_jumps_or_stays_or_is_nan() -> None:
    assert limit_drift(lambda scale: 0.005, 0.01, 0.7) == (0.7, 0.005)
    scale, drift = limit_drift(lambda scale: 0.001 if scale < 0.3 else 1.0, 0.01, 1.0)
    assert (round(scale, 3), drift) == (0.3, 0.001)
    assert limit_drift(lambda scale: 1.0 if scale else 0.0, 0.01, 1.0) == (0.0, 0.0)
    with pytest.raises(ArithmeticError, match="not finite"):
        limit_drift(lambda scale: float("nan"), 0.01, 1.0)
