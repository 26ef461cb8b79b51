"""Models that the tests of several methods share."""

from collections.abc import Iterator

import pytest
import torch
from tiny import Tensors, hf_t5, hf_vision, randn, tuned
from torch import nn


@pytest.fixture
def one_thread() -> Iterator[None]:
    """These matrices are so small that threads do nothing but wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def clip() -> tuple[nn.Module, list[Tensors]]:
    """A real CLIP vision tower and three fine-tunes."""
    model = hf_vision()
    return model, [tuned(model.state_dict(), seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="session")
def t5() -> tuple[nn.Module, list[nn.Module]]:
    """A T5 as flan-t5 is: one embedding under three names, its own head. And three fine-tunes."""

    def separated() -> nn.Module:
        model = hf_t5()
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    models = [separated() for _ in range(4)]
    for seed, model in enumerate(models[1:]):
        with torch.no_grad():
            for i, parameter in enumerate(model.parameters()):
                parameter += 0.03 * randn(*parameter.shape, seed=100 * seed + i)
    return models[0], models[1:]
