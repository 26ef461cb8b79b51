"""The recovery objective by hand and against autograd, the Adam loop against torch's own, the start of ``A``."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from reference import Settings, objective, top_right_singular_vectors
from torch import Tensor

from safemerge_pl.maths.linalg import right_singular_basis
from safemerge_pl.maths.recovery import RecoveryProblem, initial_factors, solve_recovery

SHAPES = [(7, 7), (12, 5), (5, 12)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def problem_of(
    tau: Tensor,
    tau_bar: Tensor,
    mask: Tensor,
    *,
    first: bool = False,
    plasticity: float = 0.8,
    regularization: float = 0.1,
    scoring_rank: int = 3,
    task_rank: int = 2,
) -> RecoveryProblem:
    return RecoveryProblem.build(
        tau,
        tau_bar,
        mask,
        None if first else right_singular_basis(tau_bar, scoring_rank),
        right_singular_basis(tau, task_rank),
        plasticity=plasticity,
        regularization=regularization,
    )


def random_problem(
    shape: tuple[int, int], layers: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Task vector, merged vector, mask and factors of rank 4."""
    tau, tau_bar = randn(layers, *shape, dtype=dtype), randn(layers, *shape, seed=1, dtype=dtype)
    a, b = randn(layers, 4, shape[1], seed=3, dtype=dtype), randn(layers, shape[0], 4, seed=4, dtype=dtype)
    return tau, tau_bar, randn(layers, *shape, seed=2) > 0, a, b


# tau = (1, 2), tau_bar = (0, 4), M = (0, 1), V_old = e2, V_new = (1, 2)/sqrt 5, A = (3, 5), B = 0.1:
# BA = (0.3, 0.5), C = M o BA = (0, 0.5), Delta = (0, 2.5)                                                     (Eq. 8)
# L_old = |Delta V_old|^2 = 2.5^2 = 6.25                                                                       (Eq. 10)
# L_new = |(tau - tau_bar - Delta) V_new|^2 = |(1, -4.5) (1, 2)|^2 / 5 = 64 / 5 = 12.8                         (Eq. 11)
# |C|^2 = 0.25, so L = 0.8 * 12.8 + 0.2 * 6.25 + 0.1 * 0.25 = 11.515                                           (Eq. 12)
# dL/dDelta = 2 * 0.8 * (-1) (1, -4.5) V_new V_new^T + 2 * 0.2 * Delta V_old V_old^T
#           = 1.6 * 8/5 * (1, 2) + 0.4 * (0, 2.5) = (2.56, 6.12), dL/dC = (.., 6.12 + 2 * 0.1 * 0.5) = (.., 6.22)
# H = M o dL/dC = (0, 6.22), dL/dB = H A^T = 31.1, dL/dA = B^T H = (0, 0.622)
HAND_TAU = torch.tensor([[[1.0, 2.0]]], dtype=torch.float64)
HAND_TAU_BAR = torch.tensor([[[0.0, 4.0]]], dtype=torch.float64)
HAND_MASK = torch.tensor([[[False, True]]])
HAND_A = torch.tensor([[[3.0, 5.0]]], dtype=torch.float64)
HAND_B = torch.tensor([[[0.1]]], dtype=torch.float64)


def test_objective_and_gradients_by_hand() -> None:
    problem = problem_of(HAND_TAU, HAND_TAU_BAR, HAND_MASK)
    assert problem.correction(HAND_A, HAND_B).flatten().tolist() == pytest.approx([0.0, 0.5])
    loss, grad_a, grad_b = problem.loss_and_gradients(HAND_A, HAND_B)
    assert loss.tolist() == pytest.approx([11.515])
    assert grad_b.flatten().tolist() == pytest.approx([31.1])
    assert grad_a.flatten().tolist() == pytest.approx([0.0, 0.622])


def test_first_task_has_no_old_loss_by_hand() -> None:
    # tau_bar = 0: L = 0.8 |(tau - Delta) V_new|^2 + 0.1 |C|^2 = 0.8 |(1, -0.5) (1, 2)|^2 / 5 + 0.025 = 0 + 0.025,
    # and only the regulariser pulls: H = 2 * 0.1 * (0, 0.5) = (0, 0.1), dB = 0.5, dA = (0, 0.01).
    problem = problem_of(HAND_TAU, 0 * HAND_TAU_BAR, HAND_MASK, first=True)
    loss, grad_a, grad_b = problem.loss_and_gradients(HAND_A, HAND_B)
    assert loss.tolist() == pytest.approx([0.025])
    assert grad_b.flatten().tolist() == pytest.approx([0.5])
    assert grad_a.flatten().tolist() == pytest.approx([0.0, 0.01])


# plasticity 1 leaves L_new alone, 0 leaves L_old alone; the regulariser is 0.25 at weight 1.
@pytest.mark.parametrize(("plasticity", "mu", "expected"), [(1.0, 0.0, 12.8), (0.0, 0.0, 6.25), (0.0, 1.0, 6.5)])
def test_weights_of_the_objective_by_hand(plasticity: float, mu: float, expected: float) -> None:
    problem = problem_of(HAND_TAU, HAND_TAU_BAR, HAND_MASK, plasticity=plasticity, regularization=mu)
    assert problem.loss_and_gradients(HAND_A, HAND_B)[0].tolist() == pytest.approx([expected])


def test_loss_is_a_sum_not_a_mean() -> None:
    """Twice the rows, twice the loss and the same slope of each; a mean would halve it."""
    tau, tau_bar, mask, a, b = random_problem((6, 5), layers=1)
    loss, _, grad_b = problem_of(tau, tau_bar, mask).loss_and_gradients(a, b)
    twice = problem_of(*(torch.cat([x, x], dim=1) for x in (tau, tau_bar, mask)))
    double_loss, _, double_grad_b = twice.loss_and_gradients(a, torch.cat([b, b], dim=1))
    assert torch.allclose(double_loss, 2 * loss, rtol=1e-12)
    assert torch.allclose(double_grad_b, torch.cat([grad_b, grad_b], dim=1), rtol=1e-9)


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_objective_equals_the_one_with_explicit_projectors(shape: tuple[int, int], index: int) -> None:
    tau, tau_bar, mask, a, b = random_problem(shape)
    tau_bar = tau_bar * (index > 1)
    losses = problem_of(tau, tau_bar, mask, first=index == 1).loss_and_gradients(a, b)[0]
    settings = Settings(scoring_rank=3, task_rank=2)
    for layer in range(3):
        literal = objective(tau[layer], tau_bar[layer], mask[layer], a[layer], b[layer], index, settings)
        assert losses[layer].item() == pytest.approx(literal.item(), rel=1e-12)


@pytest.mark.parametrize("plasticity", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_autograd(shape: tuple[int, int], first: bool, plasticity: float) -> None:
    tau, tau_bar, mask, a, b = random_problem(shape)
    if first:
        tau_bar = 0 * tau_bar
    _, grad_a, grad_b = problem_of(tau, tau_bar, mask, first=first, plasticity=plasticity).loss_and_gradients(a, b)
    a.requires_grad_(), b.requires_grad_()
    v_new = torch.stack([top_right_singular_vectors(x, 2, 1e-16) for x in tau])
    delta = mask * (tau + b @ a)
    loss = plasticity * (((tau - tau_bar - delta) @ v_new) ** 2).sum() + 0.1 * ((mask * (b @ a)) ** 2).sum()
    if not first:
        v_old = torch.stack([top_right_singular_vectors(x, 3, 1e-16) for x in tau_bar])
        loss = loss + (1 - plasticity) * ((delta @ v_old) ** 2).sum()
    auto_a, auto_b = torch.autograd.grad(loss, [a, b])
    assert torch.allclose(grad_a, auto_a, rtol=1e-10, atol=1e-10)
    assert torch.allclose(grad_b, auto_b, rtol=1e-10, atol=1e-10)


def test_gradients_equal_central_differences() -> None:
    """As ``gradcheck`` does, but for a gradient that autograd never saw."""
    tau, tau_bar, mask, a, b = random_problem((5, 4), layers=1)
    problem = problem_of(tau, tau_bar, mask)
    _, grad_a, grad_b = problem.loss_and_gradients(a, b)
    step = 1e-6
    for factor, grad in ((a, grad_a), (b, grad_b)):
        for position in range(factor.numel()):
            entry = factor.view(-1)[position : position + 1]
            value = entry.clone()
            ends = []
            for shift in (step, -step):
                entry.copy_(value + shift)
                ends.append(problem.loss_and_gradients(a, b)[0].item())
            entry.copy_(value)
            assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(grad.view(-1)[position].item(), rel=1e-6, abs=1e-6)


def test_at_the_start_only_b_moves() -> None:
    """With B = 0 the gradient of A is exactly 0."""
    tau, tau_bar, mask, a, b = random_problem((6, 5))
    _, grad_a, grad_b = problem_of(tau, tau_bar, mask).loss_and_gradients(a, 0 * b)
    assert not grad_a.any()
    assert grad_b.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_correction_is_exactly_zero_outside_the_mask(dtype: torch.dtype) -> None:
    tau, tau_bar, mask, a, _ = random_problem((9, 6), dtype=dtype)
    correction, _ = solve_recovery(problem_of(tau, tau_bar, mask), a, num_steps=5, lr=1e-2)
    assert correction.dtype == dtype
    assert (correction[~mask] == 0).all()
    assert (correction[mask] != 0).all()


def test_one_step_by_hand() -> None:
    # The case above at B = 0: Delta = (0, 2), L_new = |(1, -4) (1, 2)|^2 / 5 = 9.8, L_old = 4, L = 8.64.
    # dL/dDelta = 1.6 * 7/5 * (1, 2) + 0.4 * (0, 2) = (.., 5.28), dB = 5.28 * 5 = 26.4, dA = 0. Adam's first step is
    # lr * g / (|g| + 1e-8): B becomes -0.1 and A stays, so C = (0, -0.5).
    # Then Delta = (0, 1.5): L_new = |(1, -3.5) (1, 2)|^2 / 5 = 7.2, L_old = 2.25, L = 5.76 + 0.45 + 0.025 = 6.235.
    problem = problem_of(HAND_TAU, HAND_TAU_BAR, HAND_MASK)
    correction, losses = solve_recovery(problem, HAND_A, num_steps=1, lr=0.1)
    assert correction.flatten().tolist() == pytest.approx([0.0, -0.5], abs=1e-8)
    assert losses.flatten().tolist() == pytest.approx([8.64, 6.235], rel=1e-8)


def test_without_steps_nothing_is_added() -> None:
    tau, tau_bar, mask, a, b = random_problem((6, 5))
    problem = problem_of(tau, tau_bar, mask)
    correction, losses = solve_recovery(problem, a, num_steps=0, lr=1e-3)
    assert not correction.any()
    assert torch.equal(losses[0], problem.loss_and_gradients(a, 0 * b)[0])
    assert losses.shape == (1, 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_solve_equals_adam_on_the_literal_objective(shape: tuple[int, int]) -> None:
    tau, tau_bar, mask, a, _ = random_problem(shape)
    correction, losses = solve_recovery(problem_of(tau, tau_bar, mask), 0.02 * a, num_steps=20, lr=1e-2)
    for layer in range(3):
        factor_a = (0.02 * a[layer]).requires_grad_()
        factor_b = torch.zeros(shape[0], 4, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([factor_a, factor_b], lr=1e-2)
        settings = Settings(scoring_rank=3, task_rank=2)
        for step in range(20):
            optimizer.zero_grad()
            loss = objective(tau[layer], tau_bar[layer], mask[layer], factor_a, factor_b, 2, settings)
            assert losses[step, layer].item() == pytest.approx(loss.item(), rel=1e-9)
            loss.backward()
            optimizer.step()
        literal = (mask[layer] * (factor_b @ factor_a)).detach()
        assert torch.allclose(correction[layer], literal, rtol=0, atol=1e-9 * literal.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(32, 32), (48, 16), (16, 48)])
def test_stacked_solve_equals_one_solve_a_layer_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tau, tau_bar, mask, a, _ = random_problem(shape, layers=5, dtype=dtype)
    problem = problem_of(tau, tau_bar, mask)
    stacked, losses = solve_recovery(problem, a, num_steps=8, lr=1e-3)
    for layer in range(5):
        alone = RecoveryProblem(
            *(x[layer : layer + 1] for x in (problem.masked, problem.directions, problem.residual)),
            regularization=problem.regularization,
        )
        correction, alone_losses = solve_recovery(alone, a[layer : layer + 1], num_steps=8, lr=1e-3)
        assert torch.equal(correction[0], stacked[layer])
        assert torch.equal(alone_losses[:, 0], losses[:, layer])


def test_solve_leaves_its_arguments_alone() -> None:
    tau, tau_bar, mask, a, _ = random_problem((6, 5))
    problem = problem_of(tau, tau_bar, mask)
    before = [x.clone() for x in (problem.masked, problem.directions, problem.residual, a)]
    solve_recovery(problem, a, num_steps=3, lr=1e-1)
    after = (problem.masked, problem.directions, problem.residual, a)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert not a.requires_grad
    assert a.grad is None


def test_losses_fall() -> None:
    tau, tau_bar, mask, a, _ = random_problem((9, 6))
    losses = solve_recovery(problem_of(tau, tau_bar, mask), 0.02 * a, num_steps=30, lr=1e-2)[1]
    assert losses.shape == (31, 3)
    assert (losses[1:] < losses[:-1]).all()


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_solve_does_not_depend_on_the_gradient_mode(context: type) -> None:
    tau, tau_bar, mask, a, _ = random_problem((6, 5))
    expected = solve_recovery(problem_of(tau, tau_bar, mask), a, num_steps=4, lr=1e-2)
    with context():
        found = solve_recovery(problem_of(tau, tau_bar, mask), a, num_steps=4, lr=1e-2)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert not found[0].requires_grad


def test_start_has_the_asked_distribution() -> None:
    a = initial_factors(["vision.0.q", "vision.0.k"], 64, 512, seed=0, index=1)
    assert a.shape == (2, 64, 512)
    assert a.dtype == torch.float32
    assert a.device.type == "cpu"
    # 65536 draws of N(0, 0.02^2): the error of the std is 0.02 / sqrt(2 * 65536) = 5.5e-5, of the mean 7.8e-5.
    assert a.std().item() == pytest.approx(0.02, abs=3e-4)
    assert a.mean().item() == pytest.approx(0.0, abs=4e-4)
    assert a.abs().max() > 0.06  # normal, not uniform: about 177 of them lie beyond three standard deviations


def test_start_depends_on_seed_task_and_layer_only() -> None:
    start = initial_factors(["a", "b", "c"], 3, 4, seed=7, index=2)
    assert torch.equal(start, initial_factors(["c", "a", "b"], 3, 4, seed=7, index=2)[[1, 2, 0]])
    assert torch.equal(start[1], initial_factors(["b"], 3, 4, seed=7, index=2)[0])
    others = [
        start[1],
        initial_factors(["a"], 3, 4, seed=8, index=2)[0],
        initial_factors(["a"], 3, 4, seed=7, index=3)[0],
        initial_factors(["a"], 3, 4, seed=2, index=7)[0],
    ]
    assert not any(torch.equal(start[0], other) for other in others)


@contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "context",
    [
        float64_by_default,
        pytest.param(lambda: torch.device("meta"), id="another device"),
    ],
)
def test_start_does_not_depend_on_default_dtype_and_device(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Training loops change these defaults (``precision="64-true"``), and a merge must not notice."""
    expected = initial_factors(["a", "b"], 3, 4, seed=0, index=1)
    with context():
        found = initial_factors(["a", "b"], 3, 4, seed=0, index=1)
    assert found.dtype == torch.float32
    assert found.device.type == "cpu"
    assert torch.equal(found, expected)


def test_start_neither_reads_nor_moves_the_global_generator() -> None:
    expected = initial_factors(["a", "b"], 3, 4, seed=0, index=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        before = torch.get_rng_state()
        assert torch.equal(initial_factors(["a", "b"], 3, 4, seed=0, index=1), expected)
        assert torch.equal(torch.get_rng_state(), before)
