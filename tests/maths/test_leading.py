"""Leading eigenvectors by iteration: known spectra, what the proof refuses, and the way out."""

import pytest
import torch
from torch import Tensor

from safemerge_pl.maths import leading, linalg
from safemerge_pl.maths.leading import is_certain, leading_eigenvectors
from safemerge_pl.maths.linalg import right_singular_basis

SIZE, RANK = 96, 16
FLOOR = (SIZE * 2**-23) ** 2
"""Where the numerical rank of single-precision matrices of this size ends, in eigenvalues of their Gram matrices."""


def gram_of(*spectra: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gram matrices with these falling eigenvalues, and their eigenvectors."""
    generator = torch.Generator().manual_seed(seed)
    turns = torch.randn(len(spectra), SIZE, SIZE, generator=generator, dtype=torch.float64)
    vectors: Tensor = torch.linalg.qr(turns).Q
    gram = (vectors * torch.stack(spectra)[:, None]) @ vectors.mT
    return (gram + gram.mT) / 2, vectors


def angle(found: Tensor, exact: Tensor) -> float:
    """Sine of the largest angle from a found direction to the exact space."""
    return float(torch.linalg.matrix_norm(found - exact @ (exact.mT @ found), 2).max())


@pytest.fixture
def in_full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many matrices each full decomposition got."""
    calls: list[int] = []

    def decompose(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        calls.append(len(gram))
        values, vectors = torch.linalg.eigh(gram)
        return values.flip(-1)[:, :rank], vectors.flip(-1)[:, :, :rank]

    monkeypatch.setattr(leading, "_decompose", decompose)
    return calls


STEPS = torch.arange(SIZE, dtype=torch.float64)
SPECTRA = {
    "slow": 1 / (1 + STEPS),
    "gentle": (1.05 - STEPS / SIZE).square(),
    "steep": 0.8**STEPS,
    "strong directions in noise": torch.where(STEPS < 4, 1e4, 1 - STEPS / (2 * SIZE)),
    "as many as wanted": torch.where(STEPS < RANK, 2.0 - STEPS / SIZE, 0.0),
    "more than wanted": torch.where(STEPS < RANK + 3, 2.0 - STEPS / SIZE, 0.0),
}


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
@pytest.mark.parametrize("name", SPECTRA)
def test_a_known_spectrum_is_found_without_a_full_decomposition(name: str, scale: float, in_full: list[int]) -> None:
    gram, exact = gram_of(scale * SPECTRA[name])
    values, vectors = leading_eigenvectors(gram, RANK, FLOOR)
    assert torch.allclose(values, scale * SPECTRA[name][None, :RANK], rtol=1e-9, atol=0)
    assert angle(vectors, exact[:, :, :RANK]) < 1e-6
    assert torch.allclose(vectors.mT @ vectors, torch.eye(RANK, dtype=torch.float64), rtol=0, atol=1e-12)
    assert in_full == []


@pytest.mark.parametrize("number", [1, 5, RANK - 1])
def test_beyond_the_numerical_rank_vectors_are_orthonormal_and_values_nothing(number: int, in_full: list[int]) -> None:
    gram, exact = gram_of(torch.where(number > STEPS, 3.0 - STEPS / SIZE, 0.0))
    values, vectors = leading_eigenvectors(gram, RANK, FLOOR)
    assert angle(vectors[:, :, :number], exact[:, :, :number]) < 1e-6
    assert values[0, number:].abs().max() < FLOOR
    assert torch.allclose(vectors.mT @ vectors, torch.eye(RANK, dtype=torch.float64), rtol=0, atol=1e-12)
    assert in_full == []


def test_a_zero_matrix_needs_no_full_decomposition(in_full: list[int]) -> None:
    values, vectors = leading_eigenvectors(torch.zeros(2, SIZE, SIZE, dtype=torch.float64), RANK)
    assert not values.any()
    assert torch.isfinite(vectors).all()
    assert in_full == []


def test_only_what_cannot_be_proved_is_decomposed_in_full(in_full: list[int]) -> None:
    tie = torch.where(
        STEPS < RANK + 2, 2.0, 1.0
    ).double()  # the last wanted eigenvalue equals the next: any choice will do
    gram, exact = gram_of(SPECTRA["slow"], tie, SPECTRA["steep"])
    values, vectors = leading_eigenvectors(gram, RANK, FLOOR)
    assert in_full == [1]
    assert torch.allclose(values[1], tie[:RANK], rtol=1e-12, atol=0)
    assert angle(vectors[::2], exact[::2, :, :RANK]) < 1e-6
    assert angle(vectors[1:2], exact[1:2, :, : RANK + 2]) < 1e-6


def test_weak_directions_above_the_floor_are_not_taken_for_nothing(in_full: list[int]) -> None:
    # three directions, and further ones of a thousandth of their length: a first estimate sees three alone
    spectrum = torch.where(STEPS < 3, 1.0, 3 * FLOOR * (1 - STEPS / (2 * SIZE)))
    gram, exact = gram_of(spectrum)
    values, vectors = leading_eigenvectors(gram, RANK, FLOOR)
    assert torch.allclose(values, spectrum[None, :RANK], rtol=1e-3, atol=0)
    assert angle(vectors, exact[:, :, :RANK]) < 1e-4  # rounding of the Gram matrix alone is of this size
    assert in_full == [1]


def test_neighbours_that_are_too_close_for_the_schedule_are_decomposed_in_full(in_full: list[int]) -> None:
    gram, exact = gram_of(9 - STEPS / SIZE)
    values, vectors = leading_eigenvectors(gram, RANK, FLOOR)
    assert in_full == [1]
    assert torch.allclose(values, (9 - STEPS / SIZE)[None, :RANK], rtol=1e-12, atol=0)
    assert angle(vectors, exact[:, :, :RANK]) < 1e-6


@pytest.mark.parametrize("rank", [SIZE, SIZE - 1, 3 * SIZE // 4])
def test_without_room_for_surplus_columns_all_is_decomposed(rank: int, in_full: list[int]) -> None:
    gram, _ = gram_of(SPECTRA["slow"])
    values, _ = leading_eigenvectors(gram, rank)
    assert torch.allclose(values, SPECTRA["slow"][None, :rank], rtol=1e-12, atol=0)
    assert in_full == [1]


def test_an_empty_stack_stays_empty() -> None:
    values, vectors = leading_eigenvectors(torch.zeros(0, SIZE, SIZE, dtype=torch.float64), RANK)
    assert values.shape == (0, RANK)
    assert vectors.shape == (0, SIZE, RANK)


def test_the_same_input_gives_the_same_bits_and_global_random_numbers_stay() -> None:
    gram, _ = gram_of(SPECTRA["slow"], SPECTRA["gentle"])
    state = torch.random.get_rng_state()
    first, second = leading_eigenvectors(gram, RANK), leading_eigenvectors(gram.clone(), RANK)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_input_is_not_changed() -> None:
    gram, _ = gram_of(SPECTRA["strong directions in noise"])
    before = gram.clone()
    leading_eigenvectors(gram, RANK)
    assert torch.equal(gram, before)


def certain(gram: Tensor, vectors: Tensor, rank: int, floor: float = FLOOR) -> list[bool]:
    """What the proof says of vectors with their Rayleigh quotients."""
    values = ((gram @ vectors) * vectors).sum(1)
    answer: list[bool] = is_certain(gram, values, vectors, gram @ vectors, rank, floor).tolist()
    return answer


def test_the_proof_accepts_the_leading_vectors() -> None:
    gram, exact = gram_of(SPECTRA["slow"])
    assert certain(gram, exact[:, :, : RANK + 1], RANK) == [True]


@pytest.mark.parametrize("missing", [0, 7, RANK - 1])
def test_the_proof_refuses_a_space_that_misses_a_leading_vector(missing: int) -> None:
    # exact eigenvectors have no residual: only the Cholesky factorisation can tell
    gram, exact = gram_of(SPECTRA["slow"])
    others = [index for index in range(RANK + 2) if index != missing]
    assert certain(gram, exact[:, :, others], RANK) == [False]


@pytest.mark.parametrize(("tilt", "expected"), [(1e-9, True), (1e-5, False)])
def test_the_proof_refuses_a_tilted_space(tilt: float, expected: bool) -> None:
    gram, exact = gram_of(SPECTRA["as many as wanted"])
    vectors = exact[:, :, : RANK + 1].clone()
    vectors[:, :, 3] = vectors[:, :, 3] * (1 - tilt**2) ** 0.5 + tilt * exact[:, :, RANK + 5]
    assert certain(gram, vectors, RANK) == [expected]


def test_the_proof_refuses_a_vector_that_comes_twice() -> None:
    gram, exact = gram_of(torch.where(STEPS < 2, 2.0, 1 - STEPS / SIZE))
    twice = torch.stack([exact[:, :, 0], exact[:, :, 0], exact[:, :, 2]], dim=2)
    assert certain(gram, twice, 2) == [False]
    assert certain(gram, exact[:, :, :3], 2) == [True]


def test_the_proof_refuses_to_call_a_direction_above_the_floor_nothing() -> None:
    gram, exact = gram_of(torch.where(STEPS < 3, 1.0, 1e-6))
    blind = exact[:, :, :4].clone()
    values = torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    assert is_certain(gram, values, blind, gram @ blind, 3, FLOOR).tolist() == [True]
    longer = torch.cat([values, values[:, 3:]], dim=1)
    found = exact[:, :, [0, 1, 2, 4, 5]]
    assert is_certain(gram, longer, found, gram @ found, 4, FLOOR).tolist() == [False]


@pytest.fixture
def iterated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU stands for a GPU, and small matrices for large ones."""
    monkeypatch.setattr(linalg, "_ITERATED_ON", ("cpu",))
    monkeypatch.setattr(linalg, "_LARGE", 64)


@pytest.mark.parametrize("shape", [(80, 80), (300, 80), (80, 300)])
@pytest.mark.parametrize("inner", [5, 80])
def test_bases_of_stacks_are_those_of_full_decompositions(
    shape: tuple[int, int], inner: int, request: pytest.FixtureRequest
) -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (
        torch.randn(3, shape[0], inner, generator=generator),
        torch.randn(3, inner, shape[1], generator=generator),
    )
    stack = torch.cat([left @ right, torch.zeros(1, *shape)])
    expected = right_singular_basis(stack, 12)
    request.getfixturevalue("iterated")
    found = right_singular_basis(stack, 12)
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert torch.equal(found.any(1), expected.any(1))  # the same columns are zero
    difference = found.double() @ found.double().mT - expected.double() @ expected.double().mT
    assert difference.norm(dim=(1, 2)).max() < 1e-5


@pytest.mark.usefixtures("iterated")
def test_where_the_eigensolver_fails_the_svd_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.linalg.LinAlgError("no")

    stack = torch.randn(2, 80, 80, generator=torch.Generator().manual_seed(1))
    expected = right_singular_basis(stack, 12)
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.warns(RuntimeWarning, match="the slower SVD takes its place"):
        found = right_singular_basis(stack, 12)
    assert torch.allclose(found @ found.mT, expected @ expected.mT, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("iterated")
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float64, 12), (torch.float32, 40)])
def test_what_the_iteration_is_not_for_goes_the_full_way(
    dtype: torch.dtype, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linalg, "leading_eigenvectors", None)  # a call would raise
    stack = torch.randn(1, 80, 80, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert right_singular_basis(stack, rank).shape == (1, 80, rank)
