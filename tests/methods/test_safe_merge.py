"""SAFE-Merge on stacks against the literal Algorithm 1, by hand, on the zoo's real weights, and at its edges."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from reference import FLOAT32_EPS, FLOAT64_EPS, Settings, reference_fold
from safetensors.torch import load_file
from torch import Tensor

import safemerge_pl
from safemerge_pl.maths.linalg import right_singular_basis
from safemerge_pl.maths.recovery import initial_factors
from safemerge_pl.methods import MergeMethod, SafeMerge, Stack, StackResult, safe_merge

ZOO = Path(safemerge_pl.__file__).parent / "zoo" / "files"
SMALL: dict[str, Any] = {"scoring_rank": 4, "recovery_rank": 3, "task_rank": 2, "num_steps": 8}
EPS = {torch.float32: FLOAT32_EPS, torch.float64: FLOAT64_EPS}

# How far the package may be from the float64 twin: relative Frobenius error of the update where both masks agree,
# relative error of every loss, share of mask entries that may differ. Measured over all cases below (x86, torch 2.14):
# float64 1.5e-14, 3.1e-15 and no entry; float32 8.6e-6, 5.1e-7 and no entry. The 8.6e-6 is the rounding of the merged
# weight that tiny updates (1e-4) are read back from; without that case it is 3.1e-6, on the zoo's weights. A float32
# risk within rounding of the threshold can fall on the other side, so one entry in a thousand may.
UPDATE_ERROR = {torch.float64: 1e-12, torch.float32: 5e-5}
LOSS_ERROR = {torch.float64: 1e-12, torch.float32: 1e-5}
MASK_ERROR = {torch.float64: 0.0, torch.float32: 1e-3}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These matrices are so small that threads do nothing but wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every mask that SAFE-Merge makes; its result tells only the kept fraction."""
    seen: list[Tensor] = []
    original = safe_merge.keep_mask

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(original(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(safe_merge, "keep_mask", spy)
    return seen


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_stack(
    shape: tuple[int, int] = (16, 12),
    *,
    index: int = 2,
    layers: int = 2,
    dtype: torch.dtype = torch.float64,
    scale: float = 0.01,
) -> Stack:
    """Random weights as fine-tuning leaves them: changes of a few strong directions above a floor of noise."""
    pretrained = 0.05 * randn(layers, *shape)
    changes = []
    for seed in (10, 20):
        strong = randn(layers, shape[0], 4, seed=seed) @ randn(layers, 4, shape[1], seed=seed + 1)
        changes.append(scale * (strong + randn(layers, *shape, seed=seed + 2)))
    merged = pretrained + changes[0] if index > 1 else pretrained.clone()
    names = tuple(f"vision.{layer}.q" for layer in range(layers))
    return Stack(names, index, pretrained.to(dtype), merged.to(dtype), (pretrained + changes[1]).to(dtype))


def edit(stack: Stack, **values: Any) -> Stack:
    """The stack with other values and an empty cache."""
    kept = {name: getattr(stack, name) for name in ("layers", "index", "pretrained", "merged", "incoming")}
    return Stack(**{**kept, **values})


def pick(stack: Stack, layers: list[int]) -> Stack:
    """Some layers of the stack."""
    tensors = {name: getattr(stack, name)[layers] for name in ("pretrained", "merged", "incoming")}
    return edit(stack, layers=tuple(stack.layers[layer] for layer in layers), **tensors)


def update_of(stack: Stack, result: StackResult) -> Tensor:
    return result.merged.double() - stack.merged.double()


def assert_equals_twin(
    method: SafeMerge, stack: Stack, result: StackResult, mask: Tensor | None, before: Tensor | None = None
) -> Tensor:
    """Compare every layer with the twin and return the twin's merged weights; ``before`` starts the twin elsewhere."""
    dtype = stack.pretrained.dtype
    settings = Settings(**method.settings(), rank_eps=EPS[dtype])
    assert result.kept_fraction is not None
    assert result.merged.dtype == dtype
    merged = []
    for layer, name in enumerate(stack.layers):
        twin = reference_fold(
            stack.pretrained[layer],
            (stack.merged if before is None else before)[layer],
            stack.incoming[layer],
            layer=name,
            index=stack.index,
            settings=settings,
        )
        twin_merged, twin_mask, twin_update, twin_losses = twin
        agree = twin_mask == (True if mask is None else mask[layer])
        assert 1 - agree.double().mean().item() <= MASK_ERROR[dtype]
        kept = result.kept_fraction[layer].item()
        assert kept == pytest.approx(twin_mask.double().mean().item(), abs=MASK_ERROR[dtype] + 1e-7)
        error = (update_of(stack, result)[layer] - twin_update) * agree
        assert error.norm() <= UPDATE_ERROR[dtype] * twin_update.norm()
        assert (result.losses is None) == (twin_losses is None)
        if result.losses is not None and twin_losses is not None:
            assert torch.allclose(result.losses[:, layer].double(), twin_losses, rtol=LOSS_ERROR[dtype], atol=0)
        merged.append(twin_merged)
    return torch.stack(merged)


# --- against Algorithm 1 ---------------------------------------------------------------------------------------------

SWITCHES: list[dict[str, Any]] = [
    {"keep": "high"},
    {"use_mask": False},
    {"use_recovery": False},
    {"use_mask": False, "use_recovery": False},
    {"utility_weight": 0.0},
    {"utility_weight": 2.5, "keep_ratio": 0.3},
    {"keep_ratio": 0.0},
    {"keep_ratio": 1.0},
    {"plasticity": 0.0},
    {"plasticity": 1.0, "regularization": 0.0},
    {"scoring_rank": 128, "recovery_rank": 64},  # above both sides
    {"task_rank": 8},  # above the scoring rank
    {"num_steps": 0},
    {"lr": 0.1, "seed": 5},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_stack_equals_algorithm_1(shape: tuple[int, int], index: int, dtype: torch.dtype, masks: list[Tensor]) -> None:
    stack = make_stack(shape, index=index, layers=3, dtype=dtype)
    method = SafeMerge(**SMALL)
    assert_equals_twin(method, stack, method.fold_stack(stack), masks[0])
    assert len(masks) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_equals_algorithm_1(
    switch: dict[str, Any], index: int, dtype: torch.dtype, masks: list[Tensor]
) -> None:
    stack = make_stack(index=index, dtype=dtype)
    method = SafeMerge(**{**SMALL, **switch})
    result = method.fold_stack(stack)
    assert len(masks) == method.use_mask
    assert_equals_twin(method, stack, result, masks[0] if masks else None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("names", [("self_attn.{}_proj", "qkv"), ("self_attn.{}_proj", ["out"]), ("mlp.{}", ["fc1"])])
def test_two_real_tasks_equal_algorithm_1(names: tuple[str, Any], dtype: torch.dtype, masks: list[Tensor]) -> None:
    """First and last block of the zoo's encoder; the twin keeps its own merged weights from task to task."""
    pattern, kinds = names
    parameters = [f"vision_model.encoder.layers.{i}.{pattern.format(k)}.weight" for i in (0, 5) for k in kinds]
    files = [ZOO / "model", ZOO / "experts" / "mnist", ZOO / "experts" / "flags"]
    weights = [load_file(folder / "model.safetensors") for folder in files]
    pretrained, *tasks = (torch.stack([tensors[name].to(dtype) for name in parameters]) for tensors in weights)
    method = SafeMerge(keep_ratio=0.3, scoring_rank=21, recovery_rank=11, task_rank=2, num_steps=15)
    merged, twin_merged = pretrained, pretrained
    cache: dict[str, Tensor] = {}
    for index, incoming in enumerate(tasks, start=1):
        stack = Stack(tuple(parameters), index, pretrained, merged, incoming, cache)
        result = method.fold_stack(stack)
        twin_merged = assert_equals_twin(method, stack, result, masks[-1], twin_merged)
        merged = result.merged
        assert result.losses is not None
        assert (result.losses[-1] < result.losses[0]).all()
    # Two tasks later the merged weights themselves agree to the last bits of their dtype.
    assert (merged - twin_merged).norm() < 4 * EPS[dtype] * twin_merged.norm()


# --- by hand ---------------------------------------------------------------------------------------------------------

# theta_0 = (3, 0): Q0 = e1. tau = (1, 2): V_t = (1, 2)/sqrt 5, without e1 there remains e2 = Qnew.
# R = (1, 0)^2 - (0, 2)^2 = (1, -4), so keep_ratio 0 keeps the second entry and keep="high" the first.   (Eqs. 5-7)
HAND_0 = torch.tensor([[[3.0, 0.0]]], dtype=torch.float64)
HAND_T = torch.tensor([[[4.0, 2.0]]], dtype=torch.float64)
HAND = {"keep_ratio": 0.0, "scoring_rank": 1, "recovery_rank": 1, "task_rank": 1}


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ({}, [3.0, 6.0]),  # merged (3, 4) + (0, 2), Eq. 13
        ({"keep": "high"}, [4.0, 4.0]),
        ({"utility_weight": 0.0}, [3.0, 6.0]),  # R = (1, 0): again the second
        ({"keep_ratio": 1.0}, [4.0, 6.0]),
        ({"use_mask": False}, [4.0, 6.0]),
    ],
    ids=str,
)
def test_masked_fold_by_hand(switch: dict[str, Any], expected: list[float]) -> None:
    merged = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    method = SafeMerge(**{**HAND, "use_recovery": False, **switch})
    result = method.fold_stack(Stack(("x",), 2, HAND_0, merged, HAND_T))
    assert result.merged.flatten().tolist() == expected
    assert result.losses is None


def test_first_task_with_one_step_of_recovery_by_hand() -> None:
    # M o tau = (0, 2), V_new = (1, 2)/sqrt 5: L = 0.8 |(1, 0) V_new|^2 = 0.16.
    # dL/dDelta = -2 * 0.8 * 1/5 * (1, 2), so H = (0, -0.64), dB = -0.64 a2, dA = 0 (B = 0). Adam's first step is
    # lr * g / (|g| + 1e-8) against the gradient: B = 0.1 sign(a2), C = (0, 0.1 |a2|) =: (0, c).
    # Then L = 0.8 (1 - 2c)^2 / 5 + 0.1 c^2.
    result = SafeMerge(**HAND, num_steps=1, lr=0.1).fold_stack(Stack(("x",), 1, HAND_0, HAND_0, HAND_T))
    c = 0.1 * abs(initial_factors(["x"], 1, 2, seed=0, index=1)[0, 0, 1].item())
    assert result.merged.flatten().tolist() == pytest.approx([3.0, 2.0 + c], abs=1e-8)
    assert result.losses is not None
    assert result.losses.flatten().tolist() == pytest.approx([0.16, 0.16 * (1 - 2 * c) ** 2 + 0.1 * c**2], rel=1e-8)
    assert result.kept_fraction is not None
    assert result.kept_fraction.tolist() == [0.5]


# --- mask and switches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("keep", ["low", "high"])
def test_masked_out_entries_keep_their_bits(keep: str, dtype: torch.dtype, masks: list[Tensor]) -> None:
    stack = make_stack(dtype=dtype)
    merged = SafeMerge(**SMALL, keep=keep).fold_stack(stack).merged
    assert torch.equal(merged[~masks[0]], stack.merged[~masks[0]])
    assert (merged[masks[0]] != stack.merged[masks[0]]).all()


def test_reversed_selection_has_the_same_budget(masks: list[Tensor]) -> None:
    """Fig. 1: low(rho) and high(1 - rho) keep everything between them; 191 * 0.3 is not whole, so nothing twice."""
    stack = make_stack()
    low = SafeMerge(**SMALL, keep_ratio=0.3).fold_stack(stack)
    high = SafeMerge(**SMALL, keep_ratio=0.3, keep="high").fold_stack(stack)
    SafeMerge(**SMALL, keep_ratio=0.7, keep="high").fold_stack(stack)
    assert low.kept_fraction is not None
    assert high.kept_fraction is not None
    assert torch.equal(low.kept_fraction, high.kept_fraction)
    assert not (masks[0] & masks[1]).any()
    assert torch.equal(masks[0], ~masks[2])


def test_keep_ratio_0_keeps_one_entry_and_1_keeps_all() -> None:
    stack = make_stack()
    none, everything, unmasked = (
        SafeMerge(**SMALL, **switch).fold_stack(stack)
        for switch in ({"keep_ratio": 0.0}, {"keep_ratio": 1.0}, {"use_mask": False})
    )
    assert (none.merged != stack.merged).sum((1, 2)).tolist() == [1, 1]
    assert torch.equal(everything.merged, unmasked.merged)
    assert everything.kept_fraction is not None
    assert everything.kept_fraction.tolist() == [1.0, 1.0]


def test_without_mask_and_recovery_the_task_vector_is_added() -> None:
    stack = make_stack()
    result = SafeMerge(use_mask=False, use_recovery=False).fold_stack(stack)
    assert torch.equal(result.merged, stack.merged + stack.task_vector)


def test_seed_moves_the_recovery_alone() -> None:
    stack = make_stack()
    with_recovery = [SafeMerge(**SMALL, seed=seed).fold_stack(stack).merged for seed in (0, 1)]
    without = [SafeMerge(**SMALL, use_recovery=False, seed=seed).fold_stack(stack).merged for seed in (0, 1)]
    assert not torch.equal(*with_recovery)
    assert torch.equal(*without)


# --- stacks, cache, global state -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_layers_do_not_depend_on_their_company(dtype: torch.dtype) -> None:
    """A layer alone, in a stack or in another order gives the same bits."""
    stack = make_stack(layers=4, dtype=dtype)
    method = SafeMerge(**SMALL)
    merged = method.fold_stack(stack).merged
    assert torch.equal(method.fold_stack(pick(stack, [3, 1, 0, 2])).merged, merged[[3, 1, 0, 2]])
    for layer in range(4):
        assert torch.equal(method.fold_stack(pick(stack, [layer])).merged[0], merged[layer])


def test_stack_is_left_alone() -> None:
    stack, before = make_stack(), make_stack()
    SafeMerge(**SMALL).fold_stack(stack)
    for name in ("pretrained", "merged", "incoming", "task_vector", "merged_vector"):
        assert torch.equal(getattr(stack, name), getattr(before, name))


def test_cache_holds_what_depends_on_the_pretrained_weights_and_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = make_stack()
    narrow, wide = SafeMerge(**SMALL), SafeMerge(**{**SMALL, "scoring_rank": 9})
    expected = [narrow.fold_stack(edit(stack)).merged, wide.fold_stack(edit(stack)).merged]
    cache: dict[str, Tensor] = {}
    for _ in range(2):
        assert torch.equal(narrow.fold_stack(edit(stack, cache=cache)).merged, expected[0])
        assert torch.equal(wide.fold_stack(edit(stack, cache=cache)).merged, expected[1])
    decomposed = []

    def spy(matrices: Tensor, rank: int) -> Tensor:
        decomposed.append(matrices)
        return right_singular_basis(matrices, rank)

    monkeypatch.setattr(safe_merge, "right_singular_basis", spy)
    narrow.fold_stack(edit(stack, cache=cache))
    assert not any(torch.equal(matrices, stack.pretrained) for matrices in decomposed)


def test_global_generator_is_neither_read_nor_moved() -> None:
    stack = make_stack(dtype=torch.float32)
    merged = SafeMerge(**SMALL).fold_stack(stack).merged
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        before = torch.get_rng_state()
        assert torch.equal(SafeMerge(**SMALL).fold_stack(stack).merged, merged)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gradient_mode_does_not_matter(context: Callable[[], Any]) -> None:
    stack = make_stack()
    expected = SafeMerge(**SMALL).fold_stack(stack).merged
    with context():
        found = SafeMerge(**SMALL).fold_stack(make_stack()).merged
    assert torch.equal(found, expected)
    assert not found.requires_grad


def test_thread_count_changes_rounding_only(masks: list[Tensor]) -> None:
    """An entry near the threshold may flip, so masks are compared by share and updates where they agree."""
    stack = make_stack((96, 64), dtype=torch.float32)
    updates = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        updates.append(update_of(stack, SafeMerge(**SMALL).fold_stack(stack)))
    agree = masks[0] == masks[1]
    assert agree.double().mean() > 0.999
    assert ((updates[0] - updates[1]) * agree).norm() < 1e-5 * updates[0].norm()


# --- degenerate mathematics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("index", [1, 2])
def test_zero_task_vector_changes_nothing(index: int, dtype: torch.dtype) -> None:
    """The second layer did not change; the first is merged as if it were alone."""
    stack = make_stack(index=index, dtype=dtype)
    incoming = stack.incoming.clone()
    incoming[1] = stack.pretrained[1]
    result = SafeMerge(**SMALL).fold_stack(edit(stack, incoming=incoming))
    assert torch.equal(result.merged[1], stack.merged[1])
    assert torch.equal(result.merged[0], SafeMerge(**SMALL).fold_stack(pick(stack, [0])).merged[0])
    assert result.losses is not None
    assert not result.losses[:, 1].any()
    assert result.losses[:, 0].all()


def test_zero_task_vector_keeps_negative_zeros() -> None:
    """Bit for bit: hashes of an unchanged layer must not change either."""
    stack = make_stack(dtype=torch.float32)
    stack.merged[:, 0, 0] = -0.0
    merged = SafeMerge(**SMALL).fold_stack(edit(stack, incoming=stack.pretrained)).merged
    assert torch.equal(merged.view(torch.int32), stack.merged.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_second_task_after_one_that_changed_nothing(dtype: torch.dtype, masks: list[Tensor]) -> None:
    """A zero merged vector has no directions, so the old loss is 0 as at t = 1."""
    stack = make_stack(index=2, dtype=dtype)
    stack = edit(stack, merged=stack.pretrained)
    method = SafeMerge(**SMALL)
    result = method.fold_stack(stack)
    assert_equals_twin(method, stack, result, masks[0])
    blind = SafeMerge(**{**SMALL, "plasticity": 0.0}).fold_stack(stack)
    assert blind.losses is not None
    assert not blind.losses.any()


@pytest.mark.parametrize("shape", [(16, 12), (12, 16), (12, 12)])
def test_ranks_above_both_sides_are_clamped(shape: tuple[int, int]) -> None:
    stack = make_stack(shape)
    ranks = {"scoring_rank": 12, "recovery_rank": 12, "task_rank": 12}
    huge = dict.fromkeys(ranks, 10_000)
    found, expected = (SafeMerge(**{**SMALL, **chosen}).fold_stack(stack) for chosen in (huge, ranks))
    assert torch.equal(found.merged, expected.merged)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_task_vector_of_lower_rank_than_asked(dtype: torch.dtype, masks: list[Tensor]) -> None:
    """Changes of rank 2 (merged LoRA adapters) under a scoring rank of 4 and a task rank of 3."""
    stack = make_stack()
    merged, incoming = (
        stack.pretrained + 0.02 * randn(2, 16, 2, seed=seed) @ randn(2, 2, 12, seed=seed + 1) for seed in (5, 7)
    )
    stack = edit(stack, pretrained=stack.pretrained.to(dtype), merged=merged.to(dtype), incoming=incoming.to(dtype))
    method = SafeMerge(**{**SMALL, "task_rank": 3})
    result = method.fold_stack(stack)
    assert_equals_twin(method, stack, result, masks[0])
    lower = SafeMerge(**{**SMALL, "task_rank": 2}).fold_stack(stack)  # the third direction does not exist
    assert (result.merged - lower.merged).norm() < 10 * EPS[dtype] * lower.merged.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_task_vector_inside_the_general_directions(dtype: torch.dtype, masks: list[Tensor]) -> None:
    """Qnew is empty and tau Q0 Q0^T = tau: the risk is tau squared, so the smallest changes are kept."""
    pretrained = randn(2, 16, 12)
    incoming = pretrained + randn(2, 16, 4, seed=1) @ right_singular_basis(pretrained, 4).mT
    stack = edit(
        make_stack(), pretrained=pretrained.to(dtype), merged=pretrained.to(dtype), incoming=incoming.to(dtype)
    )
    SafeMerge(**SMALL).fold_stack(stack)
    for mask, tau in zip(masks[0], stack.task_vector.double().abs().numpy(), strict=True):
        assert numpy.array_equal(mask.numpy(), tau <= numpy.quantile(tau, 0.5))


def test_repeated_singular_values_of_the_pretrained_weight(masks: list[Tensor]) -> None:
    """Six equal singular values above six smaller equal ones; the span of the first six is unique."""
    pretrained = torch.zeros(2, 16, 12, dtype=torch.float64)
    pretrained.diagonal(dim1=1, dim2=2).copy_(torch.tensor([2.0] * 6 + [1.0] * 6))
    change = make_stack().task_vector
    stack = edit(make_stack(), pretrained=pretrained, merged=pretrained - 0.5 * change, incoming=pretrained + change)
    method = SafeMerge(**{**SMALL, "scoring_rank": 6})
    assert_equals_twin(method, stack, method.fold_stack(stack), masks[0])


def test_identical_layers_get_identical_results(masks: list[Tensor]) -> None:
    """Without recovery, whose start depends on the name, equal layers are merged equally."""
    stack = pick(make_stack(), [0, 0])
    merged = SafeMerge(**SMALL, use_recovery=False).fold_stack(stack).merged
    assert torch.equal(masks[0][0], masks[0][1])
    assert torch.equal(merged[0], merged[1])


def test_frozen_rows_are_ties_at_zero_risk(masks: list[Tensor]) -> None:
    """10 of 16 rows never trained. By the general score they are the least risky: 0.625 is kept, not 0.3."""
    stack = make_stack(index=1)
    incoming = stack.incoming.clone()
    incoming[:, 6:] = stack.pretrained[:, 6:]
    stack = edit(stack, incoming=incoming)
    method = SafeMerge(**SMALL, keep_ratio=0.3, utility_weight=0.0)
    result = method.fold_stack(stack)
    assert_equals_twin(method, stack, result, masks[0])
    assert result.kept_fraction is not None
    assert result.kept_fraction.tolist() == [0.625, 0.625]
    assert torch.equal(result.merged, stack.pretrained)  # nothing but the frozen rows is kept


def test_tiny_half_precision_changes_are_ranked(masks: list[Tensor]) -> None:
    """Changes near 1e-4, stored in fp16 next to weights of 0.05, read as float32."""
    stack = make_stack(scale=4e-5)
    half = {name: getattr(stack, name).half().float() for name in ("pretrained", "merged", "incoming")}
    stack = edit(stack, **half)
    assert stack.task_vector.abs().mean() < 1.5e-4
    method = SafeMerge(**SMALL, keep_ratio=0.3)
    result = method.fold_stack(stack)
    assert_equals_twin(method, stack, result, masks[0])
    assert result.kept_fraction is not None
    assert result.kept_fraction.tolist() == pytest.approx([58 / 192] * 2)  # 0.3 * 191 = 57.3: positions 0 to 57


@pytest.mark.parametrize("scale", [1e4, 1e8])
def test_huge_task_vector_stays_finite(scale: float, masks: list[Tensor]) -> None:
    """Adam moves each factor by about ``lr`` a step whatever the loss, so the correction cannot run away."""
    stack = make_stack(dtype=torch.float32)
    stack = edit(stack, incoming=stack.pretrained + scale * stack.task_vector)
    result = SafeMerge(**{**SMALL, "num_steps": 50}).fold_stack(stack)
    assert result.losses is not None
    assert torch.isfinite(result.losses).all()
    # |B| <= 50 lr and |A| <= 0.1 + 50 lr with room for Adam's momentum: |C| <= 3 * (2 * 0.05) * (0.1 + 2 * 0.05).
    correction = update_of(stack, result) - masks[0] * stack.task_vector.double()
    rounding = 2 * FLOAT32_EPS * stack.task_vector.abs().max()
    assert correction.abs().max() <= 0.06 + rounding


@dataclass
class Failing:
    """A solver that raises on its first calls."""

    function: Callable[..., Any]
    error: Exception
    times: int = 1
    calls: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return self.function(*args, **kwargs)


@pytest.mark.parametrize(
    "error", [torch.linalg.LinAlgError("failed to converge"), RuntimeError("CUSOLVER_STATUS_INVALID_VALUE")]
)
@pytest.mark.filterwarnings("ignore:the eigensolver failed")
@pytest.mark.parametrize("solver", ["eigh", "svd"])
def test_a_solver_that_fails_once_does_not_change_the_merge(
    solver: str, error: Exception, monkeypatch: pytest.MonkeyPatch, masks: list[Tensor]
) -> None:
    """Single precision goes through Gram matrices, double precision through SVDs."""
    stack = make_stack(dtype=torch.float32 if solver == "eigh" else torch.float64)
    expected = update_of(stack, SafeMerge(**SMALL).fold_stack(stack))
    failing = Failing(getattr(torch.linalg, solver), error)
    monkeypatch.setattr(torch.linalg, solver, failing)
    found = update_of(stack, SafeMerge(**SMALL).fold_stack(stack))
    assert failing.calls > 1
    assert torch.equal(masks[0], masks[1])
    assert (found - expected).norm() < 1e-5 * expected.norm()


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("keep_ratio", 1.5, r"`keep_ratio` must be in \[0, 1\], got 1.5\."),
        ("keep_ratio", -0.1, r"`keep_ratio` must be in \[0, 1\], got -0.1\."),
        ("keep_ratio", float("nan"), r"`keep_ratio` must be in \[0, 1\], got nan\."),
        ("plasticity", 1.01, r"`plasticity` must be in \[0, 1\], got 1.01\."),
        ("scoring_rank", 0, r"`scoring_rank` must be at least 1, got 0\."),
        ("recovery_rank", -3, r"`recovery_rank` must be at least 1, got -3\."),
        ("task_rank", 0, r"`task_rank` must be at least 1, got 0\."),
        ("regularization", -0.1, r"`regularization` must be a finite number of at least 0, got -0.1\."),
        ("regularization", float("inf"), r"`regularization` must be a finite number of at least 0, got inf\."),
        ("num_steps", -1, r"`num_steps` must be a finite number of at least 0, got -1\."),
        ("utility_weight", float("nan"), r"`utility_weight` must be a finite number of at least 0, got nan\."),
        ("task_rank", 2.5, r"`task_rank` must be a whole number, got 2.5\."),
        ("num_steps", 2.5, r"`num_steps` must be a whole number, got 2.5\."),
        ("lr", 0.0, r"`lr` must be a finite number above 0, got 0.0\."),
        ("lr", float("inf"), r"`lr` must be a finite number above 0, got inf\."),
        ("keep", "middle", r"`keep` must be 'low' or 'high', got 'middle'\."),
    ],
)
def test_settings_out_of_range_are_refused_at_construction(setting: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        SafeMerge(**{setting: value})


@pytest.mark.parametrize("setting", [{"keep_ratio": 0}, {"keep_ratio": 1}, {"plasticity": 0}, {"plasticity": 1}])
def test_ends_of_the_ranges_are_allowed(setting: dict[str, Any]) -> None:
    method = SafeMerge(**setting, regularization=0, num_steps=0, utility_weight=0, task_rank=1)
    assert torch.isfinite(method.fold_stack(make_stack()).merged).all()


def test_settings_are_plain_values_with_the_paper_s_defaults() -> None:
    assert SafeMerge().settings() == {
        "keep_ratio": 0.5,
        "scoring_rank": 128,
        "recovery_rank": 64,
        "task_rank": 8,
        "plasticity": 0.8,
        "regularization": 0.1,
        "num_steps": 50,
        "lr": 1e-3,
        "utility_weight": 1.0,
        "keep": "low",
        "use_mask": True,
        "use_recovery": True,
        "seed": 0,
    }


def test_method_keeps_no_state() -> None:
    method: MergeMethod = SafeMerge()
    assert method.state_dict() == {}
    method.load_state_dict({})
    with pytest.raises(ValueError, match=r"^SafeMerge keeps no state, got the keys \['count'\]\.$"):
        method.load_state_dict({"count": 3})
