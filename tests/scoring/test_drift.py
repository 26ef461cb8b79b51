"""Drift: features of noise before and after, and nothing of the module changed by looking."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from safemerge_pl.backbones import noise_images, noise_tokens
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import TaskArithmetic
from safemerge_pl.scoring import DriftGauge, feature_drift


def test_against_a_literal_twin() -> None:
    generator = torch.Generator().manual_seed(0)
    before, after = (torch.randn(7, 5, generator=generator) for _ in range(2))
    distances = []
    for one, other in zip(before.tolist(), after.tolist(), strict=True):
        inner = sum(a * b for a, b in zip(one, other, strict=True))
        lengths = (sum(a * a for a in one) * sum(b * b for b in other)) ** 0.5
        distances.append(1 - inner / lengths)
    assert feature_drift(before, after) == pytest.approx(sum(distances) / 7, abs=1e-12)
    assert feature_drift(before, 3 * before) == pytest.approx(0, abs=1e-12)
    assert feature_drift(before, -before) == pytest.approx(2)


class Tower(nn.Module):
    """A layer that is merged, and a dropout that must not act while features are compared."""

    def __init__(self, wrap: Any = None) -> None:
        super().__init__()
        self.layer, self.dropout, self.wrap = nn.Linear(12, 4), nn.Dropout(0.5), wrap

    def forward(self, inputs: Tensor) -> Any:
        found = self.dropout(self.layer(inputs.flatten(1)))
        return found if self.wrap is None else self.wrap(found)


def test_looking_changes_nothing() -> None:
    torch.manual_seed(0)
    tower, before = Tower(), torch.get_rng_state()
    tower.layer.eval()
    gauge = DriftGauge(tower, noise_images(9, (3, 2, 2)), batch_size=4)
    kept = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
    other = {"layer.weight": tower.layer.weight.detach() + 1}
    drift = gauge.measure(other)
    assert 0 < drift < 2
    assert gauge.measure() == 0
    assert all(torch.equal(kept[name], tensor) for name, tensor in tower.state_dict().items())
    assert (tower.training, tower.layer.training, tower.dropout.training) == (True, False, True)
    assert torch.equal(before, torch.get_rng_state())
    with torch.no_grad():
        tower.layer.weight += 1
    assert gauge.measure() == drift
    assert drift == pytest.approx(DriftGauge(_put(tower, kept), gauge.inputs).measure(other), abs=1e-6)  # in one batch
    with pytest.raises(KeyError, match="gone"):
        gauge.measure({"gone": torch.zeros(1)})


def _put(tower: Tower, tensors: dict[str, Tensor]) -> Tower:
    tower.load_state_dict(tensors)
    return tower


@pytest.mark.parametrize(
    "wrap",
    [
        lambda found: {"loss": None, "logits": found},
        lambda found: SimpleNamespace(pooler_output=found, last_hidden_state=torch.zeros(len(found), 1)),
        lambda found: (found, None),
        lambda found: found[:, None].expand(-1, 3, -1),
    ],
    ids=["mapping", "output", "tuple", "sequence"],
)
def test_outputs_of_every_form(wrap: Any) -> None:
    torch.manual_seed(0)
    plain, wrapped = Tower(), Tower(wrap)
    wrapped.load_state_dict(plain.state_dict())
    inputs = noise_images(3, (3, 2, 2))
    change = {"layer.weight": plain.layer.weight.detach() * 2}
    drifts = [DriftGauge(module, inputs).measure(change) for module in (plain, wrapped)]
    assert drifts[0] == pytest.approx(drifts[1], abs=1e-6)


def test_an_output_without_features() -> None:
    inputs = noise_images(3, (3, 2, 2))
    tower = Tower(lambda found: {"loss": found.mean()})
    with pytest.raises(ValueError, match="give `features`"):
        DriftGauge(tower, inputs)
    assert DriftGauge(tower, inputs, features=lambda part: tower.layer(part.flatten(1))).measure() == 0


def test_a_model_in_half_precision_and_inputs_by_name() -> None:
    gauge = DriftGauge(Tower().bfloat16(), noise_images(3, (3, 2, 2)))
    assert gauge.measure() == pytest.approx(0, abs=1e-6)
    embed = nn.Embedding(5, 4)
    tokens = {"input_ids": noise_tokens(6, range(5), length=3)}
    named = DriftGauge(embed, tokens, features=lambda part: embed(part["input_ids"]), batch_size=4)
    assert named.measure({"weight": embed.weight.detach().flip(0)}) > 0


def test_noise_is_the_same_each_time_and_looks_like_pictures() -> None:
    torch.manual_seed(1)
    images = noise_images(4, (3, 16, 24))
    torch.manual_seed(2)
    assert torch.equal(images, noise_images(4, (3, 16, 24)))
    assert not torch.equal(images, noise_images(4, (3, 16, 24), seed=1))
    torch.testing.assert_close(images.flatten(1).mean(1), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.flatten(1).std(1), torch.ones(4))
    power = torch.fft.fft2(noise_images(64, (1, 32, 32))).abs().mean((0, 1))
    assert power[1, 1] > 5 * power[12, 12]  # amplitudes fall with the frequency: here to a twelfth
    channels = images.flatten(2)
    assert torch.corrcoef(channels[0])[0, 1] > 0.3  # white noise has none
    for size in ((3, 1, 1), (8, 8), (0, 8, 8)):
        with pytest.raises(ValueError, match="channels, height and width"):
            noise_images(1, size)


def test_words_at_random() -> None:
    tokens = noise_tokens(50, [3, 5, 9], length=4)
    assert tokens.shape == (50, 4)
    assert set(tokens.flatten().tolist()) == {3, 5, 9}
    assert torch.equal(tokens, noise_tokens(50, [3, 5, 9], length=4))


def test_the_bound_of_a_drift() -> None:
    """The largest in two digits, of a merge by the real merger; none where none is needed."""
    generator = torch.Generator().manual_seed(0)
    tower = nn.Sequential()
    tower.encoder = nn.Linear(12, 8, bias=False)
    change = 0.3 * torch.randn(8, 12, generator=generator)
    merger = ContinualMerger(tower, TaskArithmetic(scaling=1.0), layers="encoder.weight")
    gauge = DriftGauge(tower, noise_images(32, (3, 2, 2)), features=lambda part: tower.encoder(part.flatten(1)))
    merger.fold({"encoder.weight": tower.encoder.weight.detach() + change}, "one")
    whole = gauge.measure(merger.merged_parameters())
    bound = gauge.find_bound(merger.parameters_at, whole / 10)
    assert bound is not None
    assert gauge.measure(merger.parameters_at(bound)) <= whole / 10
    above = float(f"{bound * 1.1:.1e}")
    assert gauge.measure(merger.parameters_at(above)) > whole / 10
    assert gauge.find_bound(merger.parameters_at, whole) is None
    again = ContinualMerger(tower, TaskArithmetic(scaling=1.0), layers="encoder.weight", max_response=bound)
    again.fold({"encoder.weight": tower.encoder.weight.detach() + change}, "one")
    assert torch.equal(again.merged_parameters()["encoder.weight"], merger.parameters_at(bound)["encoder.weight"])
    assert torch.equal(merger.parameters_at(None)["encoder.weight"], merger.accumulated_parameters()["encoder.weight"])
    for bad in (0.0, 2.0, float("nan")):
        with pytest.raises(ValueError, match="`max_drift` must be"):
            gauge.find_bound(merger.parameters_at, bad)
    with pytest.raises(ValueError, match="too small"):
        gauge.find_bound(lambda bound: merger.accumulated_parameters(), whole / 10)
    with pytest.raises(ValueError, match="`max_response` must be"):
        merger.parameters_at(0.0)
