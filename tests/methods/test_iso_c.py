"""Iso-C in small numbers."""

import pytest
import torch
from tiny import randn

from safemerge_pl.methods import IsoC, Stack
from safemerge_pl.methods.iso_c import make_isotropic

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (7, 4), (4, 7)])
def test_iso_inflates_a_matrix_of_rank_one_only_where_asked(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rank 1 -> rank 4. The mean is over min(o, d) values either way."""
    matrix = (randn(shape[0], 1, seed=1).to(dtype) @ randn(1, shape[1], seed=2).to(dtype))[None]
    size = matrix.norm().item() / 4
    kept = torch.linalg.svdvals(make_isotropic(matrix))[0].tolist()
    assert kept == pytest.approx([size, 0, 0, 0], rel=1e-5, abs=1e-6 * size)
    assert torch.allclose(make_isotropic(matrix), matrix / 4, rtol=1e-5, atol=1e-7)
    raised = torch.linalg.svdvals(make_isotropic(matrix, inflate=True))[0].tolist()
    assert raised == pytest.approx([size] * 4, rel=1e-5)


@pytest.mark.parametrize("inflate", [False, True])
def test_iso_of_a_zero_matrix_is_zero(inflate: bool) -> None:
    assert not make_isotropic(torch.zeros(2, 5, 3), inflate=inflate).any()


def test_iso_tells_the_first_task_by_its_index() -> None:
    """The first task is whole, and a zero accumulated vector later is not a first task."""
    pretrained, incoming = randn(1, 4, 4), randn(1, 4, 4) + 0.1 * randn(1, 4, 4, seed=1)
    first, second = (IsoC().fold_stack(Stack(("x",), t, pretrained, pretrained, incoming)).merged for t in (1, 2))
    assert torch.equal(first, incoming)
    values = torch.linalg.svdvals(incoming - pretrained)
    assert torch.linalg.svdvals(second - pretrained)[0].tolist() == pytest.approx([values.mean().item()] * 4, rel=1e-4)
