"""The rival methods: whole streams against literal twins, also with vectors that are zero and tied tensors."""

import re
from pathlib import Path

import pytest
import reference_methods as twins
import torch
from rivals import (
    DEFAULTS,
    LINEAR,
    SELECTED,
    TINY_ERROR,
    ZOO,
    ZOO_ERROR,
    ZOO_ERROR_ELSE,
    Make,
    each_default,
    error_of,
    every_method,
    flat,
    float64_error,
    float_tower,
    fold_in_float64,
    linear_of,
    selected_of,
    states_of,
    twin_of,
)
from tiny import Tensors, assert_same, copied, tower, tuned
from torch import nn

from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import NUFILT, OPCM, TSVM, IsoC, KnOTSTies, TaskArithmetic, TiesMerging, WUDIMerging
from safemerge_pl.methods.ties import trim_thresholds
from safemerge_pl.zoo import Zoo

pytestmark = pytest.mark.usefixtures("one_thread")


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
    assert error_of(states, twin_of(make(), pretrained, clip[1]), pretrained) < float64_error(make)


@every_method
def test_stream_through_the_merger_equals_its_twin(make: Make, clip: tuple[nn.Module, list[Tensors]]) -> None:
    pretrained = clip[0].state_dict()
    states = states_of(ContinualMerger(clip[0], make()), clip[1])
    assert error_of(states, twin_of(make(), pretrained, clip[1]), pretrained) < TINY_ERROR


@pytest.mark.parametrize("name", [name for name in ZOO if name != "ties"])
def test_zoo_through_the_merger_equals_its_twin(name: str, zoo: tuple[Tensors, list[Tensors]]) -> None:
    states = states_of(ContinualMerger(zoo[0], ZOO[name]()), zoo[1])
    assert error_of(states, twin_of(ZOO[name](), *zoo), zoo[0]) < ZOO_ERROR.get(name, ZOO_ERROR_ELSE)


def test_ties_on_the_zoo_equals_its_twin(zoo: tuple[Tensors, list[Tensors]]) -> None:
    """Float16 changes have few distinct sizes: hundreds lie exactly at the threshold, and rounding may trim them."""
    pretrained, stream = zoo
    states = states_of(ContinualMerger(pretrained, TiesMerging()), stream)
    expected = twin_of(TiesMerging(), pretrained, stream)
    assert error_of(states[:1], expected[:1], pretrained) < ZOO_ERROR_ELSE
    tau_bar = flat(twins.difference(expected[0], pretrained)).abs()
    limit, _ = trim_thresholds(lambda look: [look(iter([(tau_bar, tau_bar)]))], 0.2)
    at_limit = (tau_bar - limit).abs() < 1e-4 * limit
    assert at_limit.sum() < 1e-2 * len(at_limit)
    differs = flat(twins.difference(states[1], expected[1])).abs() > 1e-6  # the smallest change that is kept is 3e-4
    assert not (differs & ~at_limit).any()


def test_first_task_of_each_method(clip: tuple[nn.Module, list[Tensors]]) -> None:
    """Whole, scaled, or only the layers that the method acts on."""
    base, first = copied(clip[0].state_dict()), clip[1][0]
    scaled = {name: base[name] + 0.3 * (first[name] - base[name]) for name in base}
    for method in (WUDIMerging(), IsoC(), TSVM(), OPCM()):
        assert_same(states_of(ContinualMerger(base, method), [first])[0], first)
    for method in (TaskArithmetic(), TiesMerging()):
        assert_same(states_of(ContinualMerger(base, method), [first])[0], scaled)
    linear = {name: scaled[name] if name in linear_of(base) else base[name] for name in base}
    assert_same(states_of(ContinualMerger(base, KnOTSTies()), [first])[0], linear)
    selected = {
        name: base[name] + (first[name] - base[name]) if name in selected_of(base) else base[name] for name in base
    }
    assert_same(states_of(ContinualMerger(base, NUFILT()), [first])[0], selected)


CHANGES = {
    "task_arithmetic": None,
    "naive": SELECTED,
    "ties": None,
    "wudi": None,
    "iso_c": None,
    "knots": LINEAR,
    "tsv_m": None,
    "opcm": None,
    "nufilt": SELECTED,
}


@pytest.mark.parametrize("prefix", ["", "vision_model."])
@pytest.mark.parametrize("name", CHANGES)
def test_parameters_that_a_method_changes(name: str, prefix: str) -> None:
    """All others are exactly the pretrained ones, integer buffers always."""
    pretrained = tower(prefix)
    merger = ContinualMerger(pretrained, DEFAULTS[name]())
    states_of(merger, [tuned(pretrained, seed) for seed in (1, 2)])
    merged, pattern = merger.merged, CHANGES[name]
    expected = [
        key
        for key, tensor in pretrained.items()
        if tensor.is_floating_point() and (pattern is None or pattern.search(key))
    ]
    assert [key for key in merged if not torch.equal(merged[key], pretrained[key])] == expected
    same = [key for key in pretrained if key not in expected]
    assert same
    assert_same({key: merged[key] for key in same}, {key: pretrained[key] for key in same})


@pytest.mark.parametrize("make", [WUDIMerging, IsoC, TSVM])
def test_mean_rule_forgets_early_tasks(make: Make) -> None:
    """Of four tasks the weights are 1/8, 1/8, 1/4 and 1/2."""
    weight = torch.eye(3)
    pretrained = {"x.weight": weight, "x.bias": torch.zeros(1), "conv": torch.zeros(1, 1, 1, 1)}
    values = (8.0, 80.0, 800.0, 8000.0)
    stream = [
        {"x.weight": weight + 0.1, "x.bias": torch.full((1,), value), "conv": torch.full((1, 1, 1, 1), -value)}
        for value in values
    ]
    merged = states_of(ContinualMerger(pretrained, make()), stream)[-1]
    assert merged["x.bias"].tolist() == [1 + 10 + 200 + 4000]
    assert merged["conv"].flatten().tolist() == [-4211]


def stream_with(case: str, pretrained: Tensors, tuned_models: list[Tensors]) -> list[Tensors]:
    first, second, third = tuned_models
    frozen = [name for name in pretrained if "layers.1.self_attn.q_proj" in name or "layers.0.mlp.fc2" in name]
    return {
        "zero task": [first, pretrained, third],
        "zero first task": [pretrained, second, third],
        "a task that comes back": [first, second, first],
        "layers that no task trains": [
            {name: pretrained[name] if name in frozen else tensor for name, tensor in theta.items()}
            for theta in tuned_models
        ],
        "layers that the first task does not train": [
            {name: pretrained[name] if name in frozen else tensor for name, tensor in first.items()},
            second,
            third,
        ],
    }[case]


@pytest.mark.parametrize(
    "case",
    [
        "zero task",
        "zero first task",
        "a task that comes back",
        "layers that no task trains",
        "layers that the first task does not train",
    ],
)
@each_default
def test_streams_with_zero_vectors_equal_their_twins(
    make: Make, case: str, clip: tuple[nn.Module, list[Tensors]]
) -> None:
    """Nothing is divided by a length of zero, and no direction is invented."""
    pretrained = clip[0].state_dict()
    stream = stream_with(case, pretrained, clip[1])
    expected = twin_of(make(), pretrained, stream)
    assert error_of(fold_in_float64(make(), pretrained, stream), expected, pretrained) < float64_error(make)
    assert error_of(states_of(ContinualMerger(pretrained, make()), stream), expected, pretrained) < TINY_ERROR


@every_method
def test_tasks_that_changed_nothing_leave_the_pretrained_model(make: Make) -> None:
    pretrained = float_tower()
    for state in states_of(ContinualMerger(pretrained, make()), [pretrained] * 3):
        assert all(torch.equal(state[name], tensor) for name, tensor in pretrained.items())


EMBEDDING = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
T5_SELECTED = re.compile(r"(?:Attention\.[qkvo]|DenseReluDense\.wi_[01])\.weight$")


@pytest.mark.parametrize("name", [name for name in DEFAULTS if name != "nufilt"])  # its A has no name to be seeded by
def test_tied_embedding_counts_once_and_moves_once(name: str, t5: tuple[nn.Module, list[nn.Module]]) -> None:
    """The twin sees every parameter once."""
    make = DEFAULTS[name]
    pretrained, *stream = (copied(dict(model.named_parameters())) for model in (t5[0], *t5[1]))
    assert list(pretrained)[:1] == ["shared.weight"]
    assert "lm_head.weight" in pretrained
    assert not set(EMBEDDING[1:]) & set(pretrained)
    linear = [f"{path}.weight" for path, part in t5[0].named_modules() if isinstance(part, nn.Linear)]
    selected = {path: path for path in pretrained if T5_SELECTED.search(path)}
    method = make()
    states = states_of(ContinualMerger(t5[0], method), [dict(model.state_dict()) for model in t5[1]])
    expected = twin_of(make(), pretrained, stream, linear, selected)
    assert error_of(states, expected, pretrained) < TINY_ERROR
    for state in states:
        assert set(state) == set(t5[0].state_dict())
        assert all(torch.equal(state[alias], state["shared.weight"]) for alias in EMBEDDING)
    moved = not torch.equal(states[-1]["shared.weight"], pretrained["shared.weight"])
    assert moved == (name not in ("naive", "knots"))
    if isinstance(method, OPCM):
        lengths = [twins.frobenius(twins.difference(theta, pretrained)) for theta in stream]
        assert method.state_dict()["mean_norm"] == pytest.approx(sum(lengths) / 3, rel=1e-6)
