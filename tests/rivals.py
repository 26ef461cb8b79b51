"""Every rival method in several settings, streams of models, and how far from its twin a stream may be."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import reference_methods as twins
import torch
from tiny import Tensors, tower
from torch import Tensor

from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import (
    NUFILT,
    OPCM,
    TSVM,
    IsoC,
    KnOTSTies,
    MergeMethod,
    NaiveAccumulation,
    Stack,
    TaskArithmetic,
    TiesMerging,
    WUDIMerging,
)
from safemerge_pl.runtime.cores import flat_parts

Make = Callable[[], MergeMethod]
TINY_RANKS: dict[str, Any] = {"null_rank": 3, "recovery_rank": 3, "task_rank": 2, "num_steps": 12}
ZOO_RANKS: dict[str, Any] = {"null_rank": 21, "recovery_rank": 11, "task_rank": 2, "num_steps": 12}
# How far a stream may be from its float64 twin: Frobenius norm of the difference over that of the twin's accumulated
# vector, for the worst tensor and step (`error_of`). Measured (x86, torch 2.14): float64 1.9e-14. Float32 merger:
# 6.4e-5 on tiny models and 5.3e-5 on the zoo, in LayerNorm weights: next to values of 1, a float32 cannot hold changes
# of 1e-3 any better. KnOTS trims entries of singular vectors; on the zoo rounding moves one of them over the
# threshold: 2.0e-3. MKL's compatible kernels and torch's default ones give the same (6.3e-5, 5.3e-5, 2.0e-3); the
# bounds leave a factor of ten.
FLOAT64_ERROR = 1e-12
TINY_ERROR = 7e-4
ZOO_ERROR = {"knots": 2.5e-2}
ZOO_ERROR_ELSE = 6e-4


def methods(nufilt: Mapping[str, Any]) -> dict[str, Make]:
    """Every method with its defaults (NUFILT with ranks that fit) and with every setting changed."""
    return {
        "task_arithmetic": TaskArithmetic,
        "task_arithmetic-0.1": partial(TaskArithmetic, scaling=0.1),
        "naive": NaiveAccumulation,
        "ties": TiesMerging,
        "ties-0.1": partial(TiesMerging, scaling=0.1, top_k=0.55),
        "wudi": WUDIMerging,
        "wudi-fast": partial(WUDIMerging, lr=1e-4, num_steps=7),
        "iso_c": IsoC,
        "iso_c-0.5": partial(IsoC, scaling=0.5, inflate=True),
        "knots": KnOTSTies,
        "knots-scaled": partial(KnOTSTies, scaling=0.1, top_k=0.55, scale_before_ties=True, min_singular_value=0.05),
        "tsv_m": TSVM,
        "tsv_m-0.7": partial(TSVM, scaling=0.7),
        "opcm": OPCM,
        "opcm-zero_diagonal": partial(OPCM, zero_diagonal=True),
        "opcm-0.8": partial(OPCM, alpha=0.8),
        "opcm-0": partial(OPCM, alpha=0.0),
        "nufilt": partial(NUFILT, **nufilt),
        "nufilt-first": partial(NUFILT, **{**nufilt, "filter_first": True, "seed": 3, "lr": 1e-2}),
    }


TINY = methods(TINY_RANKS)
ZOO = {name: make for name, make in methods(ZOO_RANKS).items() if "-" not in name or "opcm-z" in name}
every_method = pytest.mark.parametrize("make", TINY.values(), ids=TINY)
DEFAULTS = {name: make for name, make in TINY.items() if "-" not in name}
each_default = pytest.mark.parametrize("make", DEFAULTS.values(), ids=DEFAULTS)
LINEAR = re.compile(r"\.(?:[qkv]|out)_proj\.weight$|\.fc[12]\.weight$")
SELECTED = re.compile(r"layers\.(\d+)\.(?:self_attn\.(q|k|v|out)_proj|mlp\.fc1)\.weight$")


def linear_of(state: Mapping[str, Tensor]) -> list[str]:
    """Weights of all linear layers of a CLIP vision tower."""
    return [name for name in state if LINEAR.search(name)]


def selected_of(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Weights of attention and first feed-forward layers, with their canonical names."""
    found = {name: SELECTED.search(name) for name in state}
    return {name: f"vision.{match[1]}.{match[2] or 'up'}" for name, match in found.items() if match}


def twin_of(
    method: MergeMethod,
    pretrained: Tensors,
    stream: list[Tensors],
    linear: list[str] | None = None,
    selected: dict[str, str] | None = None,
) -> list[Tensors]:
    """The twin's merged states after every task."""
    linear = linear_of(pretrained) if linear is None else linear
    selected = selected_of(pretrained) if selected is None else selected
    twin: Any = {
        TaskArithmetic: twins.task_arithmetic,
        NaiveAccumulation: partial(twins.naive_accumulation, selected=selected),
        TiesMerging: twins.ties_merging,
        WUDIMerging: twins.wudi_merging,
        IsoC: twins.iso_c,
        KnOTSTies: partial(twins.knots_ties, linear=linear),
        TSVM: twins.tsv_m,
        OPCM: lambda *args, **kwargs: twins.opcm(*args, linear=linear, **kwargs)[0],
        NUFILT: partial(twins.nufilt, selected=selected),
    }[type(method)]
    found: list[Tensors] = twin(pretrained, stream, **method.settings())
    return found


def states_of(merger: ContinualMerger, stream: list[Tensors]) -> list[Tensors]:
    """The merged states after every task."""
    found = []
    for index, incoming in enumerate(stream):
        merger.fold(incoming, f"task{index}")
        found.append(merger.merged)
    return found


def fold_in_float64(method: MergeMethod, pretrained: Tensors, stream: list[Tensors]) -> list[Tensors]:
    """What the merger does, without its float32: shows that what is left between it and the twin is rounding."""
    matrices = {
        "none": [],
        "selected": list(selected_of(pretrained)),
        "selected_out": list(selected_of(pretrained)),  # the same for CLIP
        "linear": linear_of(pretrained),
        "matrix": [name for name, tensor in pretrained.items() if tensor.ndim == 2],
    }[method.scope]
    rest = [name for name in pretrained if name not in matrices] if method.merges_rest else []
    names = selected_of(pretrained)
    theta0 = twins.doubled(pretrained)
    merged, found = dict(theta0), []
    for index, theta in enumerate(map(twins.doubled, stream), start=1):
        stacks = {
            name: Stack((names.get(name, name),), index, theta0[name][None], merged[name][None], theta[name][None])
            for name in matrices + rest
        }
        method.prepare(index, passes_over(stacks.values()))
        folds = [(name, method.fold_stack) for name in matrices] + [(name, method.fold_rest) for name in rest]
        merged = merged | {name: fold(stacks[name]).merged[0] for name, fold in folds}
        moved = {name: merged[name] - theta0[name] for name in stacks}
        factor = method.rescale(twins.frobenius(moved))
        merged |= {name: theta0[name] + factor * vector for name, vector in moved.items()}
        found.append(merged)
    return found


def passes_over(stacks: Iterable[Stack]) -> Any:
    """What :meth:`MergeMethod.prepare` gets from a fold."""
    pairs = [pair for stack in stacks for pair in zip(stack.merged_vector, stack.task_vector, strict=True)]
    return lambda look: [look(zip(*map(flat_parts, pair), strict=True)) for pair in pairs]


def float64_error(make: Make) -> float:
    """TSV-M divides by the sine of the angle between two nearly equal directions, which is 1e-3 in these streams."""
    return 1e-11 if isinstance(make(), TSVM) else FLOAT64_ERROR


def error_of(states: list[Tensors], expected: list[Tensors], pretrained: Tensors) -> float:
    """The worst relative error of the accumulated vector of a tensor, over all steps."""
    assert len(states) == len(expected)
    worst = 0.0
    for state, twin in zip(states, expected, strict=True):
        for name, tensor in twin.items():
            size = (tensor - pretrained[name].double()).norm().item()
            distance = (state[name].double() - tensor).norm().item()
            assert math.isfinite(distance), name
            worst = max(worst, distance / size if size else math.inf if distance else 0.0)
    return worst


def float_tower() -> Tensors:
    """A tower without its integer buffer."""
    return {name: tensor for name, tensor in tower().items() if tensor.is_floating_point()}


def flat(state: Mapping[str, Tensor]) -> Tensor:
    """All entries, tensors in alphabetical order."""
    return torch.cat([state[name].double().flatten() for name in sorted(state)])
