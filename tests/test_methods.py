"""The rival methods: whole streams against literal twins, the small numbers of METHODS, and its traps."""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reference_methods as twins
import torch
from tiny import Tensors, assert_same, copied, hf_t5, hf_vision, randn, tower, tuned
from torch import Tensor, nn

from safemerge_pl.callbacks import MergeCallback
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import (
    NUFILT,
    OPCM,
    TSVM,
    IsoC,
    KnOTSTies,
    MergeMethod,
    NaiveAccumulation,
    SafeMerge,
    Stack,
    TaskArithmetic,
    TiesMerging,
    WUDIMerging,
    iso_c,
    knots_ties,
    opcm,
    task_arithmetic,
    ties,
    tsv_m,
)
from safemerge_pl.methods.iso_c import isotropic
from safemerge_pl.methods.nufilt import nufilt_loss_and_gradients
from safemerge_pl.methods.opcm import project_out
from safemerge_pl.methods.ties import elect_and_sum, trim_threshold
from safemerge_pl.methods.wudi import wudi_loss_and_gradient
from safemerge_pl.zoo import Zoo

Make = Callable[[], MergeMethod]

TINY_RANKS: dict[str, Any] = {"null_rank": 3, "recovery_rank": 3, "task_rank": 2, "num_steps": 12}
ZOO_RANKS: dict[str, Any] = {"null_rank": 21, "recovery_rank": 11, "task_rank": 2, "num_steps": 12}

# How far a stream may be from its float64 twin: Frobenius norm of the difference over that of the twin's accumulated
# vector, the worst tensor and step. See `error_of`.
FLOAT64_ERROR = 1e-9
TINY_ERROR = 1e-4
ZOO_ERROR = 1e-4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These matrices are so small that threads do nothing but wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
        vectors = [(name, stack.merged_vector[0], stack.task_vector[0]) for name, stack in stacks.items()]
        method.prepare(index, lambda vectors=vectors: vectors)  # type: ignore[misc]
        folds = [(name, method.fold_stack) for name in matrices] + [(name, method.fold_rest) for name in rest]
        merged = merged | {name: fold(stacks[name]).merged[0] for name, fold in folds}
        moved = {name: merged[name] - theta0[name] for name in stacks}
        factor = method.rescale(twins.frobenius(moved))
        merged |= {name: theta0[name] + factor * vector for name, vector in moved.items()}
        found.append(merged)
    return found


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


# --- whole streams against the twins ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip() -> tuple[nn.Module, list[Tensors]]:
    """A real CLIP vision tower and three fine-tunes."""
    model = hf_vision()
    return model, [tuned(model.state_dict(), seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def zoo() -> tuple[Tensors, list[Tensors]]:
    """Two experts of the zoo, cut to their last block and everything outside the blocks."""
    from safetensors.torch import load_file

    def read(folder: Path) -> Tensors:
        whole = load_file(folder / "model.safetensors")
        return {
            name: tensor
            for name, tensor in whole.items()
            if name.startswith("vision_model.") and (".layers." not in name or ".layers.5." in name)
        }

    return read(Zoo().model), [read(Zoo().expert(task)) for task in ("weather", "fashion")]


def test_names_of_the_tests_are_those_of_the_model(clip: tuple[nn.Module, list[Tensors]]) -> None:
    modules = clip[0].named_modules()
    linear = [f"{name}.weight" for name, part in modules if isinstance(part, nn.Linear)]
    state = clip[0].state_dict()
    assert linear_of(state) == linear
    assert [name for name in linear if not name.endswith("fc2.weight")] == list(selected_of(state))


@every_method
def test_stream_in_float64_equals_its_twin(make: Make, clip: tuple[nn.Module, list[Tensors]]) -> None:
    pretrained = clip[0].state_dict()
    states = fold_in_float64(make(), pretrained, clip[1])
    assert error_of(states, twin_of(make(), pretrained, clip[1]), pretrained) < FLOAT64_ERROR


@every_method
def test_stream_through_the_merger_equals_its_twin(make: Make, clip: tuple[nn.Module, list[Tensors]]) -> None:
    pretrained = clip[0].state_dict()
    states = states_of(ContinualMerger(clip[0], make()), clip[1])
    assert error_of(states, twin_of(make(), pretrained, clip[1]), pretrained) < TINY_ERROR


@pytest.mark.parametrize("make", ZOO.values(), ids=ZOO)
def test_zoo_through_the_merger_equals_its_twin(make: Make, zoo: tuple[Tensors, list[Tensors]]) -> None:
    states = states_of(ContinualMerger(zoo[0], make()), zoo[1])
    assert error_of(states, twin_of(make(), *zoo), zoo[0]) < ZOO_ERROR
