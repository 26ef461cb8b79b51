"""Bases of stacks: hand-made cases, the literal SVD, numerical rank, and what happens when a solver fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import FLOAT32_EPS, FLOAT64_EPS, orth, top_right_singular_vectors
from torch import Tensor

from safemerge_pl.maths import linalg
from safemerge_pl.maths.linalg import (
    complement_basis,
    numerical_rank_tolerance,
    orthogonalize_jointly,
    polar_factor,
    right_singular_basis,
    thin_svd,
)

SHAPES = [(12, 12), (24, 8), (8, 24), (1, 6), (6, 1)]
DTYPES = [torch.float32, torch.float64]
EPS = {torch.float32: FLOAT32_EPS, torch.float64: FLOAT64_EPS}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def projector(basis: Tensor) -> Tensor:
    """Bases are compared through their projectors: single vectors are unique neither in sign nor in a tie."""
    return basis.double() @ basis.double().mT


def rounding(size: int, dtype: torch.dtype, condition: float = 1.0) -> float:
    """Ten times what rounding may do to orthonormal columns of a problem of this size and condition."""
    return 10 * size * EPS[dtype] * condition


def column_norms(basis: Tensor) -> list[float]:
    return [round(value, 5) for value in basis.double().norm(dim=-2).flatten().tolist()]


def fails(function: Callable[..., Any], times: int, error: Exception) -> tuple[Callable[..., Any], list[int]]:
    """``function`` whose first ``times`` calls raise, and a list that grows by one a call."""
    calls: list[int] = []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        if len(calls) <= times:
            raise error
        return function(*args, **kwargs)

    return wrapper, calls


def test_tolerance_is_the_longer_side_times_eps() -> None:
    assert numerical_rank_tolerance((7, 4, 8), torch.float32) == 8 * 2**-23
    assert numerical_rank_tolerance((9, 2), torch.float64) == 9 * 2**-52


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_direction_by_hand(dtype: torch.dtype) -> None:
    # Eq. 3. [[3, 4], [0, 0]] maps (3, 4)/5 to 5 and (4, -3)/5 to 0: V = (3, 4)/5, the second direction does not exist.
    basis = right_singular_basis(torch.tensor([[[3.0, 4.0], [0.0, 0.0]]], dtype=dtype), 2)
    assert basis.shape == (1, 2, 2)
    assert basis.dtype == dtype
    expected = torch.tensor([[9.0, 12.0], [12.0, 16.0]], dtype=torch.float64) / 25
    assert torch.allclose(projector(basis)[0], expected, rtol=0, atol=30 * EPS[dtype])
    assert column_norms(basis) == [1.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_directions_come_in_order_of_falling_singular_value(dtype: torch.dtype) -> None:
    # Singular values 1, 3, 2 belong to e1, e2, e3, so the order is e2, e3, e1.
    basis = right_singular_basis(torch.diag(torch.tensor([1.0, -3.0, 2.0], dtype=dtype))[None], 3)
    expected = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=dtype)
    assert torch.allclose(basis[0].abs(), expected, rtol=0, atol=30 * EPS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 3, 6])
@pytest.mark.parametrize("shape", SHAPES)
def test_stack_spans_what_a_full_svd_of_each_matrix_spans(
    shape: tuple[int, int], rank: int, dtype: torch.dtype
) -> None:
    matrices = randn(3, *shape, dtype=dtype)
    bases = right_singular_basis(matrices, rank)
    assert bases.shape == (3, shape[1], min(rank, *shape))
    for matrix, basis in zip(matrices, bases, strict=True):
        literal = top_right_singular_vectors(matrix.double(), rank, EPS[dtype])
        assert torch.allclose(projector(basis), projector(literal), rtol=0, atol=30 * EPS[dtype])


@pytest.mark.parametrize("shape", SHAPES)
def test_rank_above_the_smaller_side_is_clamped(shape: tuple[int, int]) -> None:
    matrices = randn(2, *shape)
    assert torch.equal(right_singular_basis(matrices, 128), right_singular_basis(matrices, min(shape)))
    assert right_singular_basis(matrices, 128).shape == (2, shape[1], min(shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_directions_beyond_the_numerical_rank_are_zero_columns(dtype: torch.dtype) -> None:
    """A product of thin factors has rank 2; what rounding adds to it is noise."""
    matrices = (randn(1, 20, 2) @ randn(1, 2, 16, seed=1)).to(dtype)
    assert column_norms(right_singular_basis(matrices, 8)) == [1.0] * 2 + [0.0] * 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cut_lies_at_the_tolerance(dtype: torch.dtype) -> None:
    """Twice the tolerance is a direction, half of it is none."""
    tolerance = numerical_rank_tolerance((2, 2), dtype)
    stack = torch.stack([torch.diag(torch.tensor([3.0, 3 * x * tolerance], dtype=dtype)) for x in (2.0, 0.5)])
    assert column_norms(right_singular_basis(stack, 2)) == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_matrix_has_no_directions(dtype: torch.dtype) -> None:
    """An SVD of zeros returns the identity, which would be taken for real directions."""
    assert not right_singular_basis(torch.zeros(2, 5, 4, dtype=dtype), 3).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_different_rank_share_a_stack(dtype: torch.dtype) -> None:
    matrices = torch.stack([randn(6, 5), torch.zeros(6, 5).double(), randn(6, 1) @ randn(1, 5, seed=1)]).to(dtype)
    bases = right_singular_basis(matrices, 4)
    assert [column_norms(basis) for basis in bases] == [[1.0] * 4, [0.0] * 4, [1.0, 0.0, 0.0, 0.0]]
    alone = torch.cat([right_singular_basis(matrix[None], 4) for matrix in matrices])
    assert torch.allclose(projector(bases), projector(alone), rtol=0, atol=30 * EPS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_singular_values(dtype: torch.dtype) -> None:
    """Single vectors are arbitrary, the span is not."""
    ones = right_singular_basis(torch.ones(1, 4, 3, dtype=dtype), 3)  # rank 1, direction (1, 1, 1)/sqrt(3)
    thirds = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    assert torch.allclose(projector(ones)[0], thirds, rtol=0, atol=30 * EPS[dtype])
    tied = right_singular_basis(torch.diag(torch.tensor([2.0, 1.0, 2.0], dtype=dtype))[None], 2)
    expected = torch.diag(torch.tensor([1.0, 0.0, 1.0])).double()
    assert torch.allclose(projector(tied)[0], expected, rtol=0, atol=30 * EPS[dtype])
    identity = right_singular_basis(torch.eye(5, dtype=dtype)[None], 3)  # any three directions will do
    assert torch.allclose((identity.mT @ identity)[0], torch.eye(3, dtype=dtype), rtol=0, atol=30 * EPS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_identical_layers_get_identical_spans(dtype: torch.dtype) -> None:
    first, second = projector(right_singular_basis(randn(1, 9, 7, dtype=dtype).repeat(2, 1, 1), 3))
    assert torch.allclose(first, second, rtol=0, atol=rounding(9, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1e-25, 1e25])
def test_directions_do_not_depend_on_scale(scale: float, dtype: torch.dtype) -> None:
    """The squares of 1e-25 underflow in single precision, those of 1e25 overflow."""
    matrices = randn(2, 10, 8, dtype=dtype)
    small, plain = right_singular_basis(matrices * scale, 3), right_singular_basis(matrices, 3)
    assert torch.allclose(projector(small), projector(plain), rtol=0, atol=100 * EPS[dtype])


@pytest.mark.parametrize("threads", [1, 2])
def test_thread_count_changes_projectors_by_rounding_only(threads: int) -> None:
    """The factors may differ, the span may not."""
    matrices = randn(2, 96, 64, dtype=torch.float32)
    literal = torch.stack([top_right_singular_vectors(matrix.double(), 20, FLOAT32_EPS) for matrix in matrices])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        basis = right_singular_basis(matrices, 20)
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(projector(basis), projector(literal), rtol=0, atol=1e-6)


def test_arguments_are_left_alone() -> None:
    matrices, before = randn(1, 4, 4, dtype=torch.float32), randn(1, 4, 4, dtype=torch.float32)
    basis = right_singular_basis(matrices, 2)
    vectors, expected = basis.clone(), basis.clone()
    complement_basis(vectors, basis[:, :, :1])
    assert torch.equal(matrices, before)
    assert torch.equal(vectors, expected)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"^`rank` must be at least 1, got 0\.$"):
        right_singular_basis(torch.ones(1, 2, 2), 0)
    with pytest.raises(ValueError, match=r"^`matrices` must be a stack \(L, d_out, d_in\), got shape \(2, 2\)\.$"):
        right_singular_basis(torch.ones(2, 2), 1)


@pytest.mark.parametrize(
    "error",
    [torch.linalg.LinAlgError("failed to converge"), RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR")],
)
def test_a_failing_eigh_is_replaced_by_the_svd(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    matrices = randn(2, 9, 7, dtype=torch.float32)
    expected = right_singular_basis(matrices, 3)
    wrapper, calls = fails(torch.linalg.eigh, 1, error)
    monkeypatch.setattr(torch.linalg, "eigh", wrapper)
    with pytest.warns(RuntimeWarning, match="the eigensolver failed"):
        found = right_singular_basis(matrices, 3)
    assert torch.allclose(projector(found), projector(expected), rtol=0, atol=1e-6)
    assert len(calls) == 1


# Calls for a stack of two: the stack, then each matrix; where the first matrix fails too, its transpose in between.
@pytest.mark.parametrize(("failures", "calls_made"), [(1, 3), (2, 4)])
@pytest.mark.parametrize("shape", [(9, 7), (7, 9)])
def test_a_failing_svd_is_retried_alone_then_transposed(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], failures: int, calls_made: int
) -> None:
    matrices = randn(2, *shape)
    expected = right_singular_basis(matrices, 3)
    wrapper, calls = fails(torch.linalg.svd, failures, torch.linalg.LinAlgError("failed to converge"))
    monkeypatch.setattr(torch.linalg, "svd", wrapper)
    assert torch.allclose(projector(right_singular_basis(matrices, 3)), projector(expected), rtol=0, atol=1e-13)
    assert len(calls) == calls_made


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failing_svd_does_not_change_the_complement(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    vectors, basis = right_singular_basis(randn(2, 9, 7), 3), right_singular_basis(randn(2, 9, 7, seed=1), 3)
    expected = complement_basis(vectors, basis)
    wrapper, calls = fails(torch.linalg.svd, failures, torch.linalg.LinAlgError("failed to converge"))
    monkeypatch.setattr(torch.linalg, "svd", wrapper)
    assert torch.allclose(projector(complement_basis(vectors, basis)), projector(expected), rtol=0, atol=1e-13)
    assert len(calls) > failures


@pytest.mark.filterwarnings("ignore:the eigensolver failed")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_solver_that_never_converges_is_an_error_not_zeros(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    for name in ("eigh", "svd"):
        wrapper, _ = fails(getattr(torch.linalg, name), 99, torch.linalg.LinAlgError("failed to converge"))
        monkeypatch.setattr(torch.linalg, name, wrapper)
    with pytest.raises(ArithmeticError, match=r"^the SVD of matrix 0 of the stack does not converge$"):
        right_singular_basis(torch.ones(2, 3, 3, dtype=dtype), 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_complement_by_hand(dtype: torch.dtype) -> None:
    # Eq. 5. Q = e1; V = (3, 4, 0)/5 loses its first entry and what is left is 0.8 e2, so the basis is e2.
    q = torch.tensor([[[1.0], [0.0], [0.0]]], dtype=dtype)
    v = torch.tensor([[[0.6], [0.8], [0.0]]], dtype=dtype)
    expected = torch.diag(torch.tensor([0.0, 1.0, 0.0])).double()
    new = complement_basis(v, q)
    assert new.dtype == dtype
    assert torch.allclose(projector(new)[0], expected, rtol=0, atol=30 * EPS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [8, 40])
def test_complement_is_orthonormal_and_completes_the_span(d: int, dtype: torch.dtype) -> None:
    vectors = right_singular_basis(randn(2, 50, d, dtype=dtype), 3)
    basis = right_singular_basis(randn(2, 50, d, seed=1, dtype=dtype), 4)
    new = complement_basis(vectors, basis)
    assert new.shape == vectors.shape
    assert torch.allclose(new.mT @ new, torch.eye(3, dtype=dtype), rtol=0, atol=rounding(d, dtype))
    assert (basis.mT @ new).abs().max() < rounding(d, dtype)
    for v, q, n in zip(vectors.double(), basis.double(), new.double(), strict=True):
        residual = (torch.eye(d).double() - q @ q.T) @ v
        bound = rounding(d, dtype, condition=1 / torch.linalg.svdvals(residual)[-1].item())
        assert torch.allclose(projector(n), projector(orth(residual, EPS[dtype])), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_complement_of_vectors_inside_the_basis_is_empty(dtype: torch.dtype) -> None:
    """A plain QR would return arbitrary directions here."""
    basis = right_singular_basis(randn(1, 30, 20, dtype=dtype), 6)
    rotation = right_singular_basis(randn(1, 6, 6, seed=1, dtype=dtype), 6)
    assert not complement_basis((basis @ rotation)[:, :, :4], basis).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_complement_reveals_its_rank(dtype: torch.dtype) -> None:
    # V = [e1, (e1 + e2)/sqrt 2 and e3]: without e1 there remain e2 and e3, one column fewer.
    v = torch.tensor([[[1.0, 0.5**0.5, 0.0], [0.0, 0.5**0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]], dtype=dtype)
    new = complement_basis(v, torch.eye(4, dtype=dtype)[None, :, :1])
    assert column_norms(new) == [1.0, 1.0, 0.0]
    expected = torch.diag(torch.tensor([0.0, 1.0, 1.0, 0.0])).double()
    assert torch.allclose(projector(new)[0], expected, rtol=0, atol=30 * EPS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_complement_with_zero_columns(dtype: torch.dtype) -> None:
    """No pretrained directions: the task's own remain. No task directions: none appear."""
    vectors = right_singular_basis(randn(1, 9, 6, dtype=dtype), 3)
    nothing = torch.zeros(1, 6, 3, dtype=dtype)
    kept = complement_basis(vectors, nothing)
    assert torch.allclose(projector(kept), projector(vectors), rtol=0, atol=rounding(9, dtype))
    assert not complement_basis(nothing, vectors).any()


def test_complement_keeps_a_direction_that_is_nearly_inside() -> None:
    # (cos t, sin t) with t = 1e-4 leaves 1e-4 e2, which is far above the rounding of float32: the basis is e2.
    v = torch.tensor([[[1.0], [1e-4]]])
    new = complement_basis(v, torch.tensor([[[1.0], [0.0]]]))
    assert torch.allclose(new.abs(), torch.tensor([[[0.0], [1.0]]]), rtol=0, atol=1e-7)


def test_complement_of_nearly_dependent_vectors_is_still_orthogonal() -> None:
    """A remainder of 1e-9 shows the rounding of what was taken away a billion times enlarged; that must go too."""
    basis = right_singular_basis(randn(1, 50, 40), 8)
    direction = complement_basis(right_singular_basis(randn(1, 50, 40, seed=1), 1), basis)
    new = complement_basis(basis[:, :, 3:4] + 1e-9 * direction, basis)
    assert (basis.mT @ new).abs().max() < 30 * FLOAT64_EPS
    assert torch.allclose(projector(new), projector(direction), rtol=0, atol=1e-6)


# helpers of the other methods


def test_the_gram_matrix_of_a_large_matrix_is_cut_up_without_a_difference() -> None:
    """Sides that do not divide by four; only what ``eigh`` reads is filled in."""
    matrices = randn(2, 530, 515)
    gram = linalg._lower_gram(matrices)
    assert torch.allclose(gram.tril(), (matrices.mT @ matrices).tril(), rtol=0, atol=1e-10)
    basis = right_singular_basis(matrices.float(), 7)
    expected = torch.linalg.svd(matrices.float().double(), full_matrices=False)[2][:, :7].mT
    assert torch.allclose(projector(basis), projector(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 5), (5, 9)])
def test_a_thin_svd_of_some_components_is_the_head_of_the_whole_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrices = randn(2, *shape, dtype=dtype)
    u, s, v = thin_svd(matrices)
    assert torch.allclose((u * s[:, None]) @ v.mT, matrices.double(), rtol=0, atol=rounding(9, dtype, s.max().item()))
    seen: list[Tensor] = []
    head = thin_svd(matrices, lambda values: seen.append(values) or 2)  # type: ignore[func-returns-value]
    for found, whole in zip(head, (u[:, :, :2], s, v[:, :, :2]), strict=True):
        assert torch.equal(found, whole)
    assert torch.equal(seen[0], s)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thin_svd_is_zero_beyond_the_numerical_rank(dtype: torch.dtype) -> None:
    matrices = (randn(1, 8, 2) @ randn(1, 2, 6, seed=1)).to(dtype)
    u, s, v = thin_svd(matrices)
    assert (s[0] > 0).tolist() == [True, True, False, False, False, False]
    assert not u[:, :, 2:].any()
    assert not v[:, :, 2:].any()


def test_two_bases_become_orthogonal_together_as_their_polar_factor_is() -> None:
    first, second = (torch.linalg.qr(randn(3, 9, 4, seed=seed)).Q for seed in (1, 2))
    found = orthogonalize_jointly(first, second, torch.float64)
    assert torch.allclose(found, polar_factor(torch.cat([first, second], dim=2))[1], rtol=0, atol=1e-12)
    assert torch.allclose(found.mT @ found, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("precision", DTYPES)
def test_a_direction_of_both_bases_is_shared_and_a_missing_one_stays_missing(precision: torch.dtype) -> None:
    """By hand: e1 is in both, so each copy gets 1/sqrt(2); e2 and e3 are alone; a zero column stays zero."""
    e1, e2, e3 = torch.eye(3, dtype=torch.float64)
    zero = torch.zeros(3, dtype=torch.float64)
    found = orthogonalize_jointly(torch.stack([e1, e2, zero], 1)[None], torch.stack([e1, zero, e3], 1)[None], precision)
    expected = torch.stack([e1 * 0.5**0.5, e2, zero, e1 * 0.5**0.5, zero, e3], 1)[None]
    assert torch.allclose(found, expected, rtol=0, atol=1e-7)
