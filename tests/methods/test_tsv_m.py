"""TSV-M in small numbers."""

import pytest
import torch
from tiny import randn
from torch import Tensor

from safemerge_pl.methods import TSVM, Stack

pytestmark = pytest.mark.usefixtures("one_thread")


def test_tsv_of_rank_one_vectors_is_their_symmetric_orthogonalisation() -> None:
    """Polar factor of two columns, ``C (C^T C)^(-1/2)``; directions that do not exist change nothing."""
    left, right = (randn(2, side, 2, seed=side).double() for side in (7, 5))
    left, right = left / left.norm(dim=1, keepdim=True), right / right.norm(dim=1, keepdim=True)
    sizes = torch.tensor([0.3, 0.2], dtype=torch.float64)
    old, new = (sizes[i] * left[:, :, i, None] * right[:, None, :, i] for i in (0, 1))

    def orthogonal(columns: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(columns.mT @ columns)
        return columns @ vectors @ torch.diag_embed(values**-0.5) @ vectors.mT

    expected = orthogonal(left) @ torch.diag(sizes) @ orthogonal(right).mT
    zero = torch.zeros_like(old)
    merged = TSVM().fold_stack(Stack(("a", "b"), 2, zero, old, new)).merged
    assert torch.allclose(merged, expected, rtol=0, atol=1e-12)


def test_tsv_of_low_rank_vectors_in_float32_does_not_follow_rounding_noise() -> None:
    """Bases are cut at the numerical rank of the data, as those of the other methods are."""
    pretrained = 0.05 * randn(1, 24, 16, seed=7)
    changes = [0.01 * randn(1, 24, 2, seed=seed) @ randn(1, 2, 16, seed=seed + 10) for seed in (1, 2)]
    zero = torch.zeros(1, 24, 16, dtype=torch.float64)
    stack = Stack(("x",), 2, pretrained, pretrained + changes[0], pretrained + changes[1])
    exact = TSVM().fold_stack(Stack(("x",), 2, zero, cut(changes[0], 2), cut(changes[1], 2))).merged
    found = TSVM().fold_stack(stack).merged.double() - pretrained.double()
    assert (found - exact).norm() < 1e-3 * exact.norm()


def cut(matrices: Tensor, rank: int) -> Tensor:
    """The nearest matrices of a rank, float64."""
    u, s, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    return (u[..., :rank] * s[:, None, :rank]) @ vh[:, :rank]


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (5, 5)])
def test_tsv_keeps_two_of_five_directions_of_each_vector(shape: tuple[int, int]) -> None:
    """k = floor(5 / 2); the padding has no effect, and the singular values are those of both vectors."""
    pretrained, merged, incoming = (randn(1, *shape, seed=seed).double() for seed in (1, 2, 3))
    found = TSVM().fold_stack(Stack(("x",), 2, pretrained, merged, incoming)).merged - pretrained
    values = [torch.linalg.svdvals(weight - pretrained)[0, :2] for weight in (merged, incoming)]
    expected = sorted(torch.cat(values).tolist(), reverse=True)
    assert torch.linalg.svdvals(found)[0].tolist() == pytest.approx([*expected, 0.0], abs=1e-12)


@pytest.mark.parametrize("shape", [(1, 6), (6, 1), (1, 1)])
def test_tsv_of_one_row_keeps_nothing(shape: tuple[int, int]) -> None:
    """k = floor(1 / 2) = 0, so X = 0 and the weight is the pretrained one."""
    pretrained, merged, incoming = (randn(1, *shape, seed=seed) for seed in (1, 2, 3))
    assert torch.equal(TSVM().fold_stack(Stack(("x",), 2, pretrained, merged, incoming)).merged, pretrained)


def test_tsv_of_a_zero_vector_keeps_half_of_the_other() -> None:
    """A zero matrix has no directions that the other's could be made orthogonal to."""
    pretrained, other = randn(1, 6, 4).double(), randn(1, 6, 4, seed=1).double()
    for merged, incoming in ((pretrained, other), (other, pretrained)):
        found = TSVM().fold_stack(Stack(("x",), 2, pretrained, merged, incoming)).merged - pretrained
        assert torch.allclose(found, cut(other - pretrained, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("factor", [1.0, -2.0])
def test_tsv_of_a_duplicated_task_is_finite(factor: float, dtype: torch.dtype) -> None:
    """The stacked bases have half their rank. Without the null space: U_k (S_1 +- S_2)/2 V_k^T."""
    tau = randn(2, 8, 6, seed=1).to(dtype)
    merged = TSVM().fold_stack(Stack(("a", "b"), 2, torch.zeros_like(tau), tau, factor * tau)).merged
    assert torch.isfinite(merged).all()
    assert torch.allclose(merged.double(), (1 + factor) / 2 * cut(tau, 3), rtol=0, atol=1e-5)
