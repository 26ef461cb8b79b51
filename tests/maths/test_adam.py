"""Our Adam is torch's, bit for bit."""

import pytest
import torch

from safemerge_pl.maths import adam as adam_module
from safemerge_pl.maths.adam import Adam


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("block", [7, 64, 1000])
def test_steps_equal_those_of_torch(block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam_module, "_BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 4, 10, generator=generator, dtype=dtype)
    theirs, ours = start.clone(), start.clone()
    optimizer, adam = torch.optim.Adam([theirs], lr=3e-3, foreach=False), Adam(ours, lr=3e-3)
    for step in range(60):
        gradient = 10.0 ** (step % 7 - 4) * torch.randn(start.shape, generator=generator, dtype=dtype)
        gradient[0, 0] = 0
        theirs.grad = gradient.clone()
        optimizer.step()
        adam.gradient.copy_(gradient)
        adam.step()
        assert torch.equal(ours, theirs)
    assert torch.equal(ours[0, 0], start[0, 0])


def test_a_layer_does_not_depend_on_what_it_is_stacked_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused Adam of torch fails here, at sizes that are no multiple of a vector register."""
    monkeypatch.setattr(adam_module, "_BLOCK", 100)
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(5, 67, generator=generator)
    gradients = torch.randn(30, 5, 67, generator=generator)
    together, alone = stack.clone(), stack.clone()
    for part, select in ((together, slice(None)), *((row, index) for index, row in enumerate(alone))):
        adam = Adam(part, lr=1e-3)
        for gradient in gradients:
            adam.gradient.copy_(gradient[select])
            adam.step()
    assert torch.equal(together, alone)


def test_a_view_that_cannot_be_flattened_is_refused() -> None:
    with pytest.raises(RuntimeError, match="view"):
        Adam(torch.zeros(4, 6).T, lr=0.1)


def test_an_empty_problem_has_nothing_to_do() -> None:
    nothing = torch.zeros(0)
    Adam(nothing, lr=0.1).step()
    assert nothing.shape == (0,)
