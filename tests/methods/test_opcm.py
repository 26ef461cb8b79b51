"""OPCM in small numbers, and the state that it keeps."""

import copy
import math
from typing import Any

import pytest
import reference_methods as twins
import torch
from rivals import float_tower, linear_of, states_of
from tiny import Tensors, assert_same, randn, tuned
from torch import Tensor, nn

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, opcm
from safemerge_pl.methods.opcm import project_out

pytestmark = pytest.mark.usefixtures("one_thread")

OPCM_SHAPES = [(6, 6), (9, 5), (5, 9)]


@pytest.mark.parametrize("zero_diagonal", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("shape", OPCM_SHAPES)
def test_opcm_thin_form_equals_the_full_one(shape: tuple[int, int], alpha: float, zero_diagonal: bool) -> None:
    tau, merged = (randn(3, *shape, seed=seed).double() for seed in (1, 2))
    found = project_out(tau, merged, alpha, zero_diagonal=zero_diagonal)
    for layer in range(3):
        expected = twins.opcm_clean(tau[layer], merged[layer], alpha, zero_diagonal=zero_diagonal)
        assert torch.allclose(found[layer], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("shape", OPCM_SHAPES)
def test_opcm_as_published_adds_nothing_along_the_accumulated_vector(shape: tuple[int, int], alpha: float) -> None:
    """<clean, tbar> ~ 1e-15 with ``zero_diagonal``, and not without it."""
    tau, merged = (randn(1, *shape, seed=seed).double() for seed in (1, 2))
    clean, kept = (project_out(tau, merged, alpha, zero_diagonal=zero) for zero in (True, False))
    assert abs((clean * merged).sum().item()) < 1e-13 * tau.norm().item() * merged.norm().item()
    assert abs((kept * merged).sum().item()) > 1e-3 * tau.norm().item() * merged.norm().item()


@pytest.mark.parametrize(
    ("values", "alpha", "protected"),
    [
        ((3.0, 2.0, 1.0), 0.5, 1),
        ((3.0, 2.0, 1.0), 0.49, 0),  # the first component crosses alpha and is not protected
        ((3.0, 2.0, 1.0), 0.9, 2),
        ((3.0, 2.0, 1.0), 0.0, 0),
        ((2.0, 0.0, 0.0), 0.99, 0),
        ((0.0, 0.0, 0.0), 0.5, 0),
    ],
)
@pytest.mark.parametrize("zero_diagonal", [False, True])
def test_opcm_protects_the_components_below_alpha(
    values: tuple[float, ...], alpha: float, protected: int, zero_diagonal: bool
) -> None:
    expected = torch.ones(3, 3)
    expected[:protected, :protected] = 0
    if zero_diagonal and any(values):
        expected.diagonal()[: 3 if all(values) else 1] = 0
    merged = torch.diag(torch.tensor(values))[None]
    found = project_out(torch.ones(1, 3, 3), merged, alpha, zero_diagonal=zero_diagonal)[0]
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"zero_diagonal": True}, {"alpha": 0.8}], ids=str)
def test_opcm_keeps_the_mean_length_and_its_scale(
    settings: dict[str, Any], clip: tuple[nn.Module, list[Tensors]]
) -> None:
    """||theta_t - theta_0|| is the mean length of the task vectors; lambda is that of the full sum."""
    pretrained = clip[0].state_dict()
    stream = [tuned(pretrained, seed, scale) for seed, scale in ((1, 0.01), (2, 0.03), (3, 0.02))]
    method = OPCM(**settings)
    merger = ContinualMerger(pretrained, method)
    _, scales = twins.opcm(pretrained, stream, linear=linear_of(pretrained), **method.settings())
    lengths = [twins.frobenius(twins.difference(theta, pretrained)) for theta in stream]
    for index, theta in enumerate(stream, start=1):
        merger.fold(theta, f"task{index}")
        mean = sum(lengths[:index]) / index
        found = twins.frobenius(twins.difference(merger.merged, pretrained))
        assert found == pytest.approx(mean, rel=1e-5)
        state = method.state_dict()
        assert state["count"] == index
        assert state["mean_norm"] == pytest.approx(mean, rel=1e-6)
        assert state["lambda"] == pytest.approx(scales[index - 1][0], rel=1e-5)
    assert scales[-1][0] > 1.2


def test_a_second_stream_does_not_inherit_the_state_of_opcm(clip: tuple[nn.Module, list[Tensors]]) -> None:
    """One method object may serve several mergers, one after another: a stream starts with its first task."""
    method, expected = OPCM(), states_of(ContinualMerger(clip[0], OPCM()), clip[1])
    for _ in range(2):
        for state, twin in zip(states_of(ContinualMerger(clip[0], method), clip[1]), expected, strict=True):
            assert_same(state, twin)


@pytest.mark.parametrize("error", [ArithmeticError("no convergence"), KeyboardInterrupt()], ids=repr)
def test_a_failed_fold_restores_the_state_of_opcm(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running mean has already taken the task in when the second stack fails."""
    pretrained = float_tower()
    first, second, third = (tuned(pretrained, seed, 0.01 * seed) for seed in (1, 2, 3))
    method = OPCM()
    merger = ContinualMerger(pretrained, method)
    merger.fold(first, "first")
    state, merged = copy.deepcopy(method.state_dict()), merger.merged
    calls = []

    def fail_second(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(method.state_dict()["count"])
        if len(calls) == 2:
            raise error
        return project_out(*args, **kwargs)

    monkeypatch.setattr(opcm, "project_out", fail_second)
    with pytest.raises(CheckpointError if isinstance(error, ArithmeticError) else KeyboardInterrupt):
        merger.fold(second, "second")
    assert calls == [2, 2]
    assert method.state_dict() == state
    assert_same(merger.merged, merged)
    with pytest.raises(CheckpointError, match="NaN"):
        merger.fold({**second, "pre_layrnorm.weight": second["pre_layrnorm.weight"] * math.nan}, "second")
    assert method.state_dict() == state
    monkeypatch.undo()
    merger.fold(third, "third")
    expected = states_of(ContinualMerger(pretrained, OPCM()), [first, third])[-1]
    assert_same(merger.merged, expected)
