"""The rival methods: whole streams against literal twins, small numbers worked out by hand, and known traps."""

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from safemerge_pl.folding import engine, stacks
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
    opcm,
)
from safemerge_pl.methods.iso_c import make_isotropic
from safemerge_pl.methods.nufilt import nufilt_loss_and_gradients
from safemerge_pl.methods.opcm import project_out
from safemerge_pl.methods.ties import elect_and_sum, trim_thresholds
from safemerge_pl.methods.wudi import wudi_loss_and_gradient
from safemerge_pl.runtime import cores
from safemerge_pl.runtime.cores import flat_parts
from safemerge_pl.zoo import Zoo

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


# --- which parameters change -----------------------------------------------------------------------------------------

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


# --- small numbers: Task Arithmetic and Ties-Merging -----------------------------------------------------------------


def test_task_arithmetic_does_not_depend_on_the_order_of_tasks(clip: tuple[nn.Module, list[Tensors]]) -> None:
    pretrained = clip[0].state_dict()
    merger = ContinualMerger(pretrained, TaskArithmetic())
    states_of(merger, clip[1][::-1])
    assert error_of([merger.merged], twin_of(TaskArithmetic(), pretrained, clip[1])[-1:], pretrained) < TINY_ERROR


@pytest.mark.parametrize(
    ("size", "top_k", "kept"),
    [(1000, 0.2, 201), (1000, 0.001, 2), (1000, 0.0005, 1), (1000, 1.0, 1000), (7, 0.5, 4), (1, 0.2, 1)],
)
def test_trimming_keeps_one_more_than_the_share(size: int, top_k: float, kept: int) -> None:
    """n + 1 entries survive where no two are equal."""
    sizes = torch.randperm(size, generator=torch.Generator().manual_seed(0)) + 1.0
    for kind in (torch.float32, torch.float64):
        pair = [sizes.to(kind), -0.1 * sizes.to(kind)]
        parts = list(zip(*(tensor.split(max(size // 3, 1)) for tensor in pair), strict=True))
        limits = trim_thresholds(lambda look, parts=parts: [look(iter([part])) for part in parts], top_k)
        for tensor, limit in zip(pair, limits, strict=True):
            assert (tensor.abs() >= limit).sum() == kept
            assert limit == tensor.abs().kthvalue(size - kept + 1).values


def test_ties_keeps_201_of_1000_entries_over_the_whole_model() -> None:
    """The same task twice: the accumulated vector has the same largest entries, so exactly those grow."""
    shapes = {"a.weight": (20, 30), "b.bias": (100,), "c": (300,)}
    pretrained = {name: torch.zeros(shape) for name, shape in shapes.items()}
    task = {name: (i + 1) * randn(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    merger = ContinualMerger(pretrained, TiesMerging())
    first, second = states_of(merger, [task, task])
    assert (flat(first) != 0).all()
    grown = flat(first) != flat(second)
    assert grown.sum() == 201
    assert flat(task).abs()[grown].min() > flat(task).abs()[~grown].max()
    assert merger.reports[0].kept_fraction == 1.0
    assert merger.reports[1].kept_fraction * 1000 == pytest.approx(201)


def test_ties_does_not_depend_on_the_parts_it_works_in(
    clip: tuple[nn.Module, list[Tensors]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = states_of(ContinualMerger(clip[0], TiesMerging()), clip[1])
    monkeypatch.setattr(cores, "_FLAT_PART", 7)
    for found, expected in zip(states_of(ContinualMerger(clip[0], TiesMerging()), clip[1]), whole, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("make", [TaskArithmetic, TiesMerging, WUDIMerging, IsoC, TSVM, OPCM])
def test_large_tensors_outside_of_stacks_are_folded_a_few_rows_at_a_time(
    make: Make, clip: tuple[nn.Module, list[Tensors]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ContinualMerger(clip[0], make())
    expected = states_of(whole, clip[1])
    monkeypatch.setattr(engine, "LARGE_ENTRIES", 1)
    monkeypatch.setattr(stacks, "LARGE_ENTRIES", 20)
    parts = ContinualMerger(clip[0], make())
    for found, state in zip(states_of(parts, clip[1]), expected, strict=True):
        assert_same(found, state)
    for found, report in zip(parts.reports, whole.reports, strict=True):
        for row, other in zip(found.layers, report.layers, strict=True):
            assert row.layer == other.layer
            assert row.task_norm == pytest.approx(other.task_norm)
            assert row.update_norm == pytest.approx(other.update_norm)
            assert row.kept_fraction == pytest.approx(other.kept_fraction)


def test_election_takes_the_sign_of_the_sum_and_the_majority_where_it_is_zero() -> None:
    pair = torch.tensor([[3.0, -1.0, 2.0, 0.0, 5.0, -4.0], [1.0, -2.0, -3.0, 0.0, -5.0, 4.0]])
    assert elect_and_sum(pair, 1.0).tolist() == [4, -3, -3, 0, 5, 4]
    assert elect_and_sum(pair, -1.0).tolist() == [4, -3, -3, 0, -5, -4]
    assert elect_and_sum(pair, 0.0).tolist() == [4, -3, -3, 0, 0, 0]


@pytest.mark.parametrize(("sign", "expected"), [(1.0, 4.0), (-1.0, 0.0)])
def test_majority_is_that_of_the_whole_model(sign: float, expected: float) -> None:
    """The coordinate in ``a`` cancels; the tensor ``b`` decides."""
    pretrained = {"a": torch.zeros(1), "b": torch.zeros(3)}
    stream = [{"a": torch.tensor([value]), "b": torch.full((3,), sign)} for value in (2.0, -2.0)]
    merged = states_of(ContinualMerger(pretrained, TiesMerging(scaling=1.0, top_k=1.0)), stream)[-1]
    assert merged["a"].tolist() == [expected]
    assert merged["b"].tolist() == [3 * sign] * 3


# --- small numbers: WUDI ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 6)])
def test_wudi_gram_form_equals_the_literal_one(shape: tuple[int, int]) -> None:
    """Gram matrices in the place of products as large as the output side."""
    vectors = randn(2, 3, *shape, seed=1).double()
    grams = vectors.mT @ vectors / vectors.square().sum((2, 3), keepdim=True)
    moved, start = randn(3, *shape, seed=2).double(), vectors.sum(0)
    losses, gradient = wudi_loss_and_gradient(moved, vectors[1] @ grams[0] + vectors[0] @ grams[1], grams.sum(0))
    for layer in range(3):
        leaf = (start + moved)[layer].clone().requires_grad_()
        loss = twins.wudi_objective(leaf, list(vectors[:, layer]))
        loss.backward()
        first = twins.wudi_objective(start[layer], list(vectors[:, layer]))
        assert losses[layer].item() == pytest.approx((loss - first).item(), rel=1e-12)
        assert torch.allclose(gradient[layer], leaf.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wudi_skips_the_term_of_an_empty_vector(dtype: torch.dtype) -> None:
    """Trap 15.5: 0/0. With one vector left the start is its minimum, with none nothing moves."""
    pretrained = (0.05 * randn(4, 6, 5)).to(dtype)
    merged, incoming = (pretrained + (0.01 * randn(4, 6, 5, seed=seed)).to(dtype) for seed in (1, 2))
    merged[1], incoming[2] = pretrained[1], pretrained[2]
    merged[3] = incoming[3] = pretrained[3]
    stack = Stack(("a", "b", "c", "d"), 2, pretrained, merged, incoming)
    result = WUDIMerging().fold_stack(stack)
    assert result.losses is not None
    assert result.losses[:, 0].all()
    assert not result.losses[:, 1:].any()
    for layer, expected in ((1, incoming), (2, merged), (3, pretrained)):
        assert torch.allclose(result.merged[layer], expected[layer], rtol=0, atol=1e-7)
    alone = Stack(("a",), 2, pretrained[:1], merged[:1], incoming[:1])
    assert torch.equal(result.merged[0], WUDIMerging().fold_stack(alone).merged[0])


# --- small numbers: Iso-C --------------------------------------------------------------------------------------------


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


# --- small numbers: KnOTS --------------------------------------------------------------------------------------------


def test_knots_without_trimming_and_conflict_adds_both_vectors() -> None:
    """Rows of ``V`` on disjoint inputs, each of one sign, so both blocks agree everywhere."""
    rows = torch.zeros(3, 16, dtype=torch.float64)
    for row, sign in enumerate((1, -1, 1)):
        for seed, block in enumerate(rows.view(3, 2, 8).unbind(1)):
            block[row, row::3] = sign * (0.1 + randn(8, seed=10 * row + seed).double().abs())[row::3]
    rows /= rows.norm(dim=1, keepdim=True)
    u = torch.linalg.qr(randn(6, 3, seed=9).double()).Q
    both = u @ torch.diag(torch.tensor([0.5, 0.2, 0.1], dtype=torch.float64)) @ rows
    pretrained = randn(6, 8, seed=4).double()
    stack = Stack(("x",), 2, pretrained[None], (pretrained + both[:, :8])[None], (pretrained + both[:, 8:])[None])
    expected = stack.merged + 0.7 * (stack.merged_vector + stack.task_vector)
    found = KnOTSTies(scaling=0.7, top_k=1.0).fold_stack(stack).merged
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    # with conflict or trimming it does not
    turned = Stack(("x",), 2, pretrained[None], stack.merged, (pretrained - both[:, 8:])[None])
    expected = turned.merged + 0.7 * (turned.merged_vector + turned.task_vector)
    assert not torch.allclose(KnOTSTies(scaling=0.7, top_k=1.0).fold_stack(turned).merged, expected, atol=1e-3)
    assert not torch.allclose(KnOTSTies(scaling=0.7, top_k=0.1).fold_stack(stack).merged, expected, atol=1e-3)


def test_knots_drops_components_below_its_absolute_limit() -> None:
    """Tiny vectors lose everything and add nothing; a layer beside them is not affected."""
    pretrained = torch.zeros(2, 6, 4)
    changes = [torch.stack([1e-6 * randn(6, 4, seed=seed), randn(6, 4, seed=seed)]) for seed in (1, 2)]
    stack = Stack(("a", "b"), 2, pretrained, changes[0], changes[1])
    merged = KnOTSTies().fold_stack(stack).merged
    assert torch.equal(merged[0], changes[0][0])
    assert not torch.equal(merged[1], changes[0][1])
    lower = KnOTSTies(min_singular_value=1e-9).fold_stack(stack).merged
    assert not torch.equal(lower[0], changes[0][0])
    assert torch.equal(lower[1], merged[1])


# --- small numbers: TSV-M --------------------------------------------------------------------------------------------


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
    """DESIGN 4.4: bases are cut at the numerical rank of the data, as those of the other methods are."""
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
    """Trap 15.1: a zero matrix has no directions that the other's could be made orthogonal to."""
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


# --- small numbers: OPCM ---------------------------------------------------------------------------------------------

OPCM_SHAPES = [(6, 6), (9, 5), (5, 9)]


@pytest.mark.parametrize("zero_diagonal", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("shape", OPCM_SHAPES)
def test_opcm_thin_form_equals_the_full_one(shape: tuple[int, int], alpha: float, zero_diagonal: bool) -> None:
    tau, merged = (randn(3, *shape, seed=seed).double() for seed in (1, 2))
    found = project_out(tau, merged, alpha, zero_diagonal=zero_diagonal)
    for layer in range(3):
        expected = twins.opcm_clean(tau[layer], merged[layer], alpha, zero_diagonal=zero_diagonal)
        assert torch.allclose(found[layer], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("shape", OPCM_SHAPES)
def test_opcm_as_published_adds_nothing_along_the_accumulated_vector(shape: tuple[int, int], alpha: float) -> None:
    """<clean, tbar> ~ 1e-15 with ``zero_diagonal``, and not without it."""
    tau, merged = (randn(1, *shape, seed=seed).double() for seed in (1, 2))
    clean, kept = (project_out(tau, merged, alpha, zero_diagonal=zero) for zero in (True, False))
    assert abs((clean * merged).sum().item()) < 1e-13 * tau.norm().item() * merged.norm().item()
    assert abs((kept * merged).sum().item()) > 1e-3 * tau.norm().item() * merged.norm().item()


@pytest.mark.parametrize(
    ("values", "alpha", "protected"),
    [
        ((3.0, 2.0, 1.0), 0.5, 1),
        ((3.0, 2.0, 1.0), 0.49, 0),  # the first component crosses alpha and is not protected
        ((3.0, 2.0, 1.0), 0.9, 2),
        ((3.0, 2.0, 1.0), 0.0, 0),
        ((2.0, 0.0, 0.0), 0.99, 0),
        ((0.0, 0.0, 0.0), 0.5, 0),
    ],
)
@pytest.mark.parametrize("zero_diagonal", [False, True])
def test_opcm_protects_the_components_below_alpha(
    values: tuple[float, ...], alpha: float, protected: int, zero_diagonal: bool
) -> None:
    expected = torch.ones(3, 3)
    expected[:protected, :protected] = 0
    if zero_diagonal and any(values):
        expected.diagonal()[: 3 if all(values) else 1] = 0
    merged = torch.diag(torch.tensor(values))[None]
    found = project_out(torch.ones(1, 3, 3), merged, alpha, zero_diagonal=zero_diagonal)[0]
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"zero_diagonal": True}, {"alpha": 0.8}], ids=str)
def test_opcm_keeps_the_mean_length_and_its_scale(
    settings: dict[str, Any], clip: tuple[nn.Module, list[Tensors]]
) -> None:
    """||theta_t - theta_0|| is the mean length of the task vectors; lambda is that of the full sum."""
    pretrained = clip[0].state_dict()
    stream = [tuned(pretrained, seed, scale) for seed, scale in ((1, 0.01), (2, 0.03), (3, 0.02))]
    method = OPCM(**settings)
    merger = ContinualMerger(pretrained, method)
    _, scales = twins.opcm(pretrained, stream, linear=linear_of(pretrained), **method.settings())
    lengths = [twins.frobenius(twins.difference(theta, pretrained)) for theta in stream]
    for index, theta in enumerate(stream, start=1):
        merger.fold(theta, f"task{index}")
        mean = sum(lengths[:index]) / index
        found = twins.frobenius(twins.difference(merger.merged, pretrained))
        assert found == pytest.approx(mean, rel=1e-5)
        state = method.state_dict()
        assert state["count"] == index
        assert state["mean_norm"] == pytest.approx(mean, rel=1e-6)
        assert state["lambda"] == pytest.approx(scales[index - 1][0], rel=1e-5)
    assert scales[-1][0] > 1.2


def test_a_second_stream_does_not_inherit_the_state_of_opcm(clip: tuple[nn.Module, list[Tensors]]) -> None:
    """One method object may serve several mergers, one after another: a stream starts with its first task."""
    method, expected = OPCM(), states_of(ContinualMerger(clip[0], OPCM()), clip[1])
    for _ in range(2):
        for state, twin in zip(states_of(ContinualMerger(clip[0], method), clip[1]), expected, strict=True):
            assert_same(state, twin)


# --- small numbers: NUFILT -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9, 7), (5, 8)])
def test_nufilt_loss_and_gradients_equal_the_literal_ones(shape: tuple[int, int]) -> None:
    """P V_o = 0, so the second term needs ``tau B A V_o`` alone."""
    tau, merged = (randn(2, *shape, seed=seed).double() for seed in (1, 2))
    a, b = randn(2, 3, shape[1], seed=3).double(), randn(2, shape[1], 3, seed=4).double()
    old, new = (
        torch.stack([twins.leading(matrix, rank) for matrix in stack]) for stack, rank in ((merged, 4), (tau, 2))
    )
    target = (tau - merged - (tau - tau @ old @ old.mT)) @ new
    target = torch.cat([target, torch.zeros(2, shape[0], old.shape[2], dtype=target.dtype)], dim=2)
    losses, *gradients = nufilt_loss_and_gradients(tau, a, b, torch.cat([new, old], dim=2), target)
    for layer in range(2):
        leaves = [factor[layer].clone().requires_grad_() for factor in (a, b)]
        loss = twins.nufilt_objective(tau[layer], merged[layer], old[layer], new[layer], *leaves)
        loss.backward()
        assert losses[layer].item() == pytest.approx(loss.item(), rel=1e-12)
        for gradient, leaf in zip(gradients, leaves, strict=True):
            assert gradient.shape[1:] == leaf.shape
            assert torch.allclose(gradient[layer], leaf.grad, rtol=1e-11, atol=1e-11)


def test_nufilt_without_steps_adds_nothing_on_the_old_directions() -> None:
    tau, merged = 0.1 * randn(1, 9, 7, seed=1).double(), 0.1 * randn(1, 9, 7, seed=2).double()
    zero = torch.zeros_like(tau)
    update = NUFILT(**{**TINY_RANKS, "num_steps": 0}).fold_stack(Stack(("x",), 2, zero, merged, tau)).merged - merged
    old = twins.leading(merged[0], 3)
    assert (update[0] @ old).abs().max() < 1e-15
    assert torch.allclose(update[0], tau[0] - tau[0] @ old @ old.T, rtol=0, atol=1e-15)


@pytest.mark.parametrize("shape", [(9, 7), (5, 8), (6, 6)])
def test_nufilt_ranks_above_both_sides_are_clamped(shape: tuple[int, int]) -> None:
    pretrained, merged, incoming = (randn(1, *shape, seed=seed) for seed in (1, 2, 3))
    ranks = ("null_rank", "recovery_rank", "task_rank")
    stack = Stack(("x",), 2, pretrained, merged, incoming)
    found, expected = (NUFILT(**dict.fromkeys(ranks, rank)).fold_stack(stack) for rank in (10_000, min(shape)))
    assert torch.equal(found.merged, expected.merged)


@pytest.mark.parametrize("shape", [(9, 7), (5, 8), (6, 6)])
@pytest.mark.parametrize("null_rank", [3, 100])
def test_nufilt_quirk_filters_the_first_inputs(null_rank: int, shape: tuple[int, int]) -> None:
    """Right vectors of the thin SVD of a zero matrix are the first min(r, o, d) coordinate axes."""
    pretrained, incoming = randn(1, *shape), randn(1, *shape, seed=1)
    stack = Stack(("x",), 1, pretrained, pretrained, incoming)
    rank = min(null_rank, *shape)
    merged = NUFILT(null_rank=null_rank, filter_first=True).fold_stack(stack).merged
    assert torch.equal(merged[:, :, :rank], pretrained[:, :, :rank])
    roundings = 5 * torch.finfo(torch.float32).eps * incoming.abs().max().item()
    assert torch.allclose(merged[:, :, rank:], incoming[:, :, rank:], rtol=0, atol=roundings)
    whole = NUFILT(null_rank=null_rank).fold_stack(stack).merged
    assert torch.allclose(whole, incoming, rtol=0, atol=roundings)


# --- traps: vectors that are zero, tied tensors, settings ------------------------------------------------------------


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
    """Traps 15.1 and 15.5."""
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


@pytest.fixture(scope="module")
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


EMBEDDING = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
T5_SELECTED = re.compile(r"(?:Attention\.[qkvo]|DenseReluDense\.wi_[01])\.weight$")


@pytest.mark.parametrize("name", [name for name in DEFAULTS if name != "nufilt"])  # its A has no name to be seeded by
def test_tied_embedding_counts_once_and_moves_once(name: str, t5: tuple[nn.Module, list[nn.Module]]) -> None:
    """Trap 15.8: the twin sees every parameter once."""
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


def test_nufilt_acts_on_every_feed_forward_matrix_of_t5(t5: tuple[nn.Module, list[nn.Module]]) -> None:
    """q, k, v, o, wi_0, wi_1 and wo."""
    merger = ContinualMerger(t5[0], NUFILT(**TINY_RANKS))
    pretrained, merged = t5[0].state_dict(), states_of(merger, [model.state_dict() for model in t5[1][:2]])[-1]
    changed = [name for name in merged if not torch.equal(merged[name], pretrained[name])]
    pattern = re.compile(r"(?:Attention\.[qkvo]|DenseReluDense\.(?:wi_[01]|wo))\.weight$")
    assert changed == [name for name in pretrained if pattern.search(name)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(OPCM, alpha=1.0), r"`alpha` must be in \[0, 1\), got 1.0: at 1 nothing would be projected"),
        (partial(OPCM, alpha=1.5), r"`alpha` must be in \[0, 1\), got 1.5"),
        (partial(OPCM, alpha=-0.1), r"`alpha` must be in \[0, 1\), got -0.1"),
        (partial(OPCM, alpha=math.nan), r"`alpha` must be in \[0, 1\), got nan"),
        (partial(TiesMerging, top_k=0.0), r"`top_k` must be in \(0, 1\], got 0.0"),
        (partial(TiesMerging, top_k=20), r"`top_k` must be in \(0, 1\], got 20"),
        (partial(TiesMerging, top_k=math.nan), r"`top_k` must be in \(0, 1\], got nan"),
        (partial(KnOTSTies, top_k=0.0), r"`top_k` must be in \(0, 1\], got 0.0"),
        (partial(KnOTSTies, top_k=20), r"`top_k` must be in \(0, 1\], got 20"),
        (partial(KnOTSTies, top_k=-0.2), r"`top_k` must be in \(0, 1\], got -0.2"),
        (partial(WUDIMerging, lr=0.0), r"`lr` must be above 0 and `num_steps` at least 0, got 0.0 and 50"),
        (partial(WUDIMerging, lr=math.nan), r"`lr` must be above 0"),
        (partial(WUDIMerging, num_steps=-1), r"`num_steps` at least 0, got 1e-05 and -1"),
        (partial(NUFILT, null_rank=0), r"`null_rank` must be at least 1, got 0"),
        (partial(NUFILT, recovery_rank=-2), r"`recovery_rank` must be at least 1, got -2"),
        (partial(NUFILT, task_rank=0), r"`task_rank` must be at least 1, got 0"),
        (partial(NUFILT, lr=-1e-3), r"`lr` must be above 0"),
        (partial(NUFILT, num_steps=-1), r"`num_steps` at least 0"),
    ],
)
def test_settings_out_of_range_are_refused_at_construction(make: Make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        partial(OPCM, alpha=0.0),
        partial(TiesMerging, top_k=1.0),
        partial(TiesMerging, top_k=1e-6),
        partial(KnOTSTies, top_k=1.0),
        partial(KnOTSTies, top_k=1e-6),
        partial(WUDIMerging, num_steps=0),
        partial(NUFILT, null_rank=1, recovery_rank=1, task_rank=1, num_steps=0),
    ],
    ids=str,
)
def test_ends_of_the_ranges_are_allowed(make: Make) -> None:
    pretrained = float_tower()
    for state in states_of(ContinualMerger(pretrained, make()), [tuned(pretrained, seed) for seed in (1, 2)]):
        assert all(torch.isfinite(tensor).all() for tensor in state.values())


# --- what every method promises the merger ---------------------------------------------------------------------------


def test_defaults_are_those_of_the_paper_for_eight_tasks() -> None:
    assert {name: make().settings() for name, make in DEFAULTS.items() if name != "nufilt"} == {
        "task_arithmetic": {"scaling": 0.3},
        "naive": {"scaling": 1.0},
        "ties": {"scaling": 0.3, "top_k": 0.2},
        "wudi": {"lr": 1e-5, "num_steps": 50},
        "iso_c": {"scaling": 1.0, "inflate": False},
        "knots": {"scaling": 0.3, "top_k": 0.2, "scale_before_ties": False, "min_singular_value": 1e-4},
        "tsv_m": {"scaling": 1.0},
        "opcm": {"alpha": 0.5, "zero_diagonal": False},
    }
    assert NUFILT().settings() == {
        "null_rank": 128,
        "recovery_rank": 64,
        "task_rank": 8,
        "num_steps": 50,
        "lr": 1e-3,
        "filter_first": False,
        "seed": 0,
    }


@every_method
def test_a_method_is_rebuilt_from_its_settings_even_after_folds(make: Make) -> None:
    pretrained, method = float_tower(), make()
    before = method.settings()
    states_of(ContinualMerger(pretrained, method), [tuned(pretrained, seed) for seed in (1, 2)])
    assert method.settings() == before
    rebuilt: Any = type(method)
    assert rebuilt(**method.settings()) == make()


@every_method
def test_the_callback_takes_every_method(make: Make) -> None:
    method = make()
    callback = MergeCallback(method)
    assert callback.method is method
    assert callback.tasks == []


def test_labels_are_distinct() -> None:
    labels = [make().label for make in DEFAULTS.values()] + [SafeMerge.label]
    assert len(set(labels)) == len(labels) == 10


@each_default
def test_only_opcm_keeps_state(make: Make) -> None:
    method = make()
    if isinstance(method, OPCM):
        other = OPCM()
        other.load_state_dict({"lambda": 2.5, "mean_norm": 0.25, "count": 3})
        assert other.state_dict() == {"lambda": 2.5, "mean_norm": 0.25, "count": 3}
        return
    assert method.state_dict() == {}
    with pytest.raises(ValueError, match=r"keeps no state, got the keys \['count'\]"):
        method.load_state_dict({"count": 3})


@every_method
def test_repeats_are_identical_and_inputs_unchanged(make: Make) -> None:
    pretrained = float_tower()
    stream = [tuned(pretrained, seed) for seed in (1, 2, 3)]
    before = [copied(state) for state in (pretrained, *stream)]
    random_state = torch.get_rng_state()
    once = states_of(ContinualMerger(pretrained, make()), stream)
    assert torch.equal(torch.get_rng_state(), random_state)
    torch.manual_seed(12345)
    again = states_of(ContinualMerger(pretrained, make()), stream)
    torch.set_rng_state(random_state)
    for left, right in zip((*once, pretrained, *stream), (*again, *before), strict=True):
        assert_same(left, right)


@each_default
@pytest.mark.parametrize("index", [1, 2])
def test_a_stack_is_not_changed_and_its_tensors_are_not_handed_on(index: int, make: Make) -> None:
    pretrained = randn(2, 6, 4)
    merged = pretrained if index == 1 else pretrained + 0.1 * randn(2, 6, 4, seed=1)
    parts = (pretrained, merged.clone(), pretrained + 0.1 * randn(2, 6, 4, seed=2))
    stack = Stack(("a", "b"), index, *parts)
    method, before = make(), [part.clone() for part in parts]
    method.prepare(index, passes_over([stack]))
    folds = [method.fold_stack, *([method.fold_rest] if method.merges_rest else [])]
    for fold in folds:
        result = fold(stack).merged
        result.add_(1.0)
        assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))


@every_method
def test_order_of_the_dictionaries_does_not_matter(make: Make) -> None:
    pretrained = float_tower()
    stream = [tuned(pretrained, seed) for seed in (1, 2, 3)]
    expected = states_of(ContinualMerger(pretrained, make()), stream)
    turned = [dict(reversed(theta.items())) for theta in stream]
    for left, right in zip(states_of(ContinualMerger(pretrained, make()), turned), expected, strict=True):
        assert_same(left, right)
    other = states_of(ContinualMerger(dict(reversed(pretrained.items())), make()), stream)
    floats = {name: tensor for name, tensor in pretrained.items() if tensor.is_floating_point()}
    assert error_of(other, [{name: state[name].double() for name in floats} for state in expected], floats) < 1e-5


@every_method
def test_saved_and_continued_is_bit_identical(make: Make, tmp_path: Path) -> None:
    """OPCM has to find its lambda, mean and count again."""
    pretrained = float_tower()
    stream = [tuned(pretrained, seed, scale) for seed, scale in ((1, 0.01), (2, 0.03), (3, 0.02), (4, 0.01))]
    whole = ContinualMerger(pretrained, make())
    states_of(whole, stream)
    merger = ContinualMerger(pretrained, make())
    for index, theta in enumerate(stream):
        if index:
            merger.save(tmp_path / str(index))
            given = make() if index == 2 else None  # else rebuilt from the saved settings
            merger = ContinualMerger.load(tmp_path / str(index), pretrained, method=given)
        merger.fold(theta, f"task{index}")
    assert_same(merger.merged, whole.merged)
    assert merger.method == whole.method
    assert merger.method.state_dict() == whole.method.state_dict()
    assert [report.merged for report in merger.reports] == [report.merged for report in whole.reports]


@pytest.mark.parametrize("error", [ArithmeticError("no convergence"), KeyboardInterrupt()], ids=repr)
def test_a_failed_fold_restores_the_state_of_opcm(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running mean has already taken the task in when the second stack fails."""
    pretrained = float_tower()
    first, second, third = (tuned(pretrained, seed, 0.01 * seed) for seed in (1, 2, 3))
    method = OPCM()
    merger = ContinualMerger(pretrained, method)
    merger.fold(first, "first")
    state, merged = copy.deepcopy(method.state_dict()), merger.merged
    calls = []

    def fail_second(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(method.state_dict()["count"])
        if len(calls) == 2:
            raise error
        return project_out(*args, **kwargs)

    monkeypatch.setattr(opcm, "project_out", fail_second)
    with pytest.raises(CheckpointError if isinstance(error, ArithmeticError) else KeyboardInterrupt):
        merger.fold(second, "second")
    assert calls == [2, 2]
    assert method.state_dict() == state
    assert_same(merger.merged, merged)
    with pytest.raises(CheckpointError, match="NaN"):
        merger.fold({**second, "pre_layrnorm.weight": second["pre_layrnorm.weight"] * math.nan}, "second")
    assert method.state_dict() == state
    monkeypatch.undo()
    merger.fold(third, "third")
    expected = states_of(ContinualMerger(pretrained, OPCM()), [first, third])[-1]
    assert_same(merger.merged, expected)


@pytest.mark.parametrize(("name", "steps"), [("wudi", 50), ("nufilt", 12)])
def test_inner_optimisations_report_falling_losses(name: str, steps: int) -> None:
    pretrained = float_tower()
    merger = ContinualMerger(pretrained, DEFAULTS[name]())
    first, second = (merger.fold(tuned(pretrained, seed, 0.1), f"task{seed}") for seed in (1, 2))
    assert first.losses == ()
    assert len(second.losses) == steps + 1
    assert second.losses[-1] < second.losses[0]
    rows = {row.layer: row for row in second.layers}
    assert rows["vision.0.q"].loss_first is not None
    assert sum(row.loss_first or 0.0 for row in rows.values()) == pytest.approx(second.losses[0], rel=1e-5)
