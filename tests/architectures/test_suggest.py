"""A model of no known family: the message is enough to go on, and what it says works."""

import ast
import re

import pytest
import tiny
import torch
from torch import nn

from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import TSVM, SafeMerge, TaskArithmetic


class Mixer(nn.Module):
    """A block of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix_tokens, self.mix_channels, self.norm = nn.Linear(8, 8), nn.Linear(8, 16), nn.LayerNorm(8)


class Own(nn.Module):
    """A model of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(10, 8)
        self.trunk = nn.ModuleList(Mixer() for _ in range(3))
        self.out2 = nn.Linear(8, 4)


def test_the_patterns_of_the_message_can_be_pasted() -> None:
    with tiny.seeded():
        model = Own()
    with pytest.raises(ValueError, match="of a known family") as caught:
        ContinualMerger(model)
    found = re.search(r"as patterns for `layers`: (\[.*\])\.$", str(caught.value))
    assert found is not None
    patterns = ast.literal_eval(found[1])
    assert patterns == ["trunk.*.mix_tokens.weight", "trunk.*.mix_channels.weight", "out2.weight"]
    merger = ContinualMerger(model, tiny.fast_method(), layers=patterns[:2])
    assert len(merger.layers) == 6
    report = merger.fold(tiny.tuned(model.state_dict(), 1), "a")
    assert 0 < report.kept_fraction < 1


def test_convolutions_are_for_methods_that_merge_every_tensor() -> None:
    """torchvision's ResNet."""
    import torchvision

    with tiny.seeded():
        model = torchvision.models.resnet18(num_classes=4)
    with pytest.raises(ValueError, match=r"few matrices \(fc.weight\) but tensors of other shapes; methods that merge"):
        ContinualMerger(model, SafeMerge())
    before = tiny.copied(model.state_dict())
    for method in (TaskArithmetic(0.5), TSVM()):
        merger = ContinualMerger(model, method)
        merger.fold(tiny.tuned(before, 1), "a")
        model.load_state_dict(merger.merged)
        pixels = torch.zeros(1, 3, 32, 32)
        assert torch.isfinite(model.eval()(pixels)).all()
        assert not torch.equal(model.layer1[0].conv1.weight, before["layer1.0.conv1.weight"])
        model.load_state_dict(before)
