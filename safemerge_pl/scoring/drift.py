"""Drift: how far a model's features of noise have moved, which tells without data what general knowledge was lost."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.nn.functional import normalize

from safemerge_pl.backbones.base import Backbone
from safemerge_pl.folding.bound import require_drift_bound, require_one_process
from safemerge_pl.runtime.modes import evaluating
from safemerge_pl.scoring.weights import swapped_weights

__all__ = ["DriftGauge", "feature_drift", "gauge_of", "require_gauge"]

_OUTPUTS = ("image_embeds", "text_embeds", "pooler_output", "logits", "last_hidden_state")
"""Which entry of an output that is no tensor holds the features, the first that is there."""

_BOUNDS = [float(f"{digits}e{power}") for power in range(-7, 1) for digits in range(10, 100)]
"""Bounds on the response that :meth:`DriftGauge.find_bound` may answer, from 1e-6 on."""


def feature_drift(before: Tensor, after: Tensor) -> float:
    r"""Compute the mean cosine distance between two sets of features.

    .. math:: \mathrm{drift} = \frac{1}{N} \sum_i \left(1 - \frac{f_i^\top g_i}{\|f_i\|\,\|g_i\|}\right)

    Args:
        before: :math:`f`, ``(N, D)``, of the pretrained model.
        after: :math:`g`, ``(N, D)``, of the same inputs.

    Returns:
        In [0, 2]; 0 where no feature has turned.

    Example:
        >>> feature_drift(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [1.0, 0.0]]))
        0.5
    """
    ends = normalize(after.double(), dim=-1) - normalize(before.double(), dim=-1)
    return ends.square().sum(-1).mean().item() / 2  # the same as one less the cosine, and exact where it is small


class DriftGauge:
    """Measure how far the features of noise have moved since this was made.

    Merging moves what a model makes of any input, and of noise about as much as of real data: over all methods, bounds
    and experts that were tried, the drift ranks merges by the general knowledge that they lost (see *Results*). It
    needs a module that runs, but no data.

    Args:
        module: holds the pretrained weights now. Its output may be a tensor or what transformers returns.
        inputs: a batch of what it takes, such as :func:`~safemerge_pl.backbones.noise_images` of its size, or tokens
            at random by name.
        tower: the part that weights are of in :meth:`measure`; the whole module if left out.
        features: gives features ``(N, D)`` of inputs; the module's own output if left out.
        batch_size: inputs at a time.

    Raises:
        ValueError: if the module's output holds no features.

    Example:
        >>> linear = nn.Linear(2, 2, bias=False)
        >>> _ = nn.init.eye_(linear.weight)
        >>> gauge = DriftGauge(linear, torch.eye(2))
        >>> gauge.measure({"weight": torch.tensor([[0.0, 1.0], [1.0, 0.0]])}), gauge.measure()
        (1.0, 0.0)
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Any,
        *,
        tower: nn.Module | None = None,
        features: Callable[[Any], Any] | None = None,
        batch_size: int = 64,
    ) -> None:
        self.module, self.inputs, self.batch_size = module, inputs, batch_size
        self.tower = module if tower is None else tower
        self._features = module if features is None else features
        self._reference = self._look()

    def measure(self, weights: Mapping[str, Tensor] | None = None) -> float:
        """Measure the drift of the module as it is, or with other weights in its tower for a while.

        Args:
            weights: by the tower's names, such as ``merger.merged_parameters()``.
        """
        with nullcontext() if weights is None else swapped_weights(self.tower, weights):
            return feature_drift(self._reference, self._look())

    def find_bound(
        self, parameters_at: Callable[[float | None], Mapping[str, Tensor]], max_drift: float
    ) -> float | None:
        """Find the largest bound on the response with which a merge drifts no further than asked.

        Args:
            parameters_at: what a bound would deploy, such as ``merger.parameters_at``.
            max_drift: in (0, 2).

        Returns:
            The bound in two digits, rounded down; ``None`` if the whole accumulated vector drifts no further.

        Raises:
            ValueError: if ``max_drift`` is not in (0, 2), or even a bound of 1e-6 drifts further.

        Example:
            >>> layer = nn.Linear(2, 1, bias=False)
            >>> _ = nn.init.constant_(layer.weight, 1.0)
            >>> gauge = DriftGauge(layer, torch.eye(2), features=lambda x: torch.cat([layer(x), torch.ones(2, 1)], 1))
            >>> gauge.find_bound(lambda bound: {"weight": torch.full((1, 2), 1 + min(bound or 1.0, 1.0))}, 0.01)
            0.33
        """
        require_drift_bound(max_drift)
        if self.measure(parameters_at(None)) <= max_drift:
            return None
        place = bisect_right(_BOUNDS, max_drift, key=lambda bound: self.measure(parameters_at(bound)))
        if place == 0:
            raise ValueError(f"`max_drift` {max_drift} is too small: a bound of {_BOUNDS[0]} drifts further.")
        return _BOUNDS[place - 1]

    @torch.inference_mode()
    def _look(self) -> Tensor:
        """The features of all inputs, on the CPU."""
        weight = next(self.module.parameters())
        count = len(_first(self.inputs))
        found = []
        with evaluating(self.module):
            for start in range(0, count, self.batch_size):
                part = move_data_to_device(_cut(self.inputs, slice(start, start + self.batch_size)), weight.device)
                if isinstance(part, Tensor) and part.is_floating_point():
                    part = part.to(weight.dtype)  # of a model in half precision
                found.append(_features_in(self._features(part)).flatten(1).float())
        return torch.cat(found).cpu()


def gauge_of(
    backbone: object, tower: nn.Module, pretrained: Mapping[str, Tensor] | None = None, count: int = 256
) -> DriftGauge | None:
    """Make a gauge of a backbone that knows what noise it takes; ``None`` for anything else.

    Args:
        backbone: the model.
        tower: the part of it that is merged.
        pretrained: weights of the tower, where it holds others now.
        count: inputs of noise.
    """
    inputs = backbone.noise(count) if isinstance(backbone, Backbone) else None
    if not isinstance(backbone, Backbone) or inputs is None:
        return None
    here = {} if pretrained is None else {name: pretrained[name] for name in tower.state_dict() if name in pretrained}
    with swapped_weights(tower, here):
        return DriftGauge(backbone, inputs, tower=tower, features=backbone.features)


def require_gauge(backbone: object, world_size: int = 1) -> None:
    """Refuse a bound on the drift where it could not be measured.

    Args:
        backbone: loaded.
        world_size: processes that fold together.

    Raises:
        ValueError: if there are several, or nobody knows what noise the model takes.
    """
    require_one_process(world_size)
    if not isinstance(backbone, Backbone) or backbone.noise(1) is None:
        raise ValueError("`max_drift`: nobody knows what noise this model takes; give its backbone a method `noise`.")


def _first(inputs: Any) -> Tensor:
    """A tensor whose length is the number of examples."""
    tensor: Tensor = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
    return tensor


def _cut(inputs: Any, part: slice) -> Any:
    return {name: tensor[part] for name, tensor in inputs.items()} if isinstance(inputs, Mapping) else inputs[part]


def _features_in(output: Any) -> Tensor:
    """The tensor of features in what a module returned."""
    if isinstance(output, Tensor):
        return output
    for name in _OUTPUTS:
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise ValueError(
        f"the module returns a {type(output).__name__} with no features that are known; give `features`, a function "
        "from inputs to a tensor."
    )
