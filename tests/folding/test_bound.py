"""The response bound: by the literal form, for every method, saved and resumed, in memory and on disk."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import response
from tiny import FC1, Add, Tensors, as_file, assert_same, copied, folder_of, only_weights, tower, tuned
from torch import nn

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.live import LiveMerger
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
    SafeShare,
    TaskArithmetic,
    TiesMerging,
    WUDIMerging,
)

RANKS: dict[str, Any] = {"recovery_rank": 3, "task_rank": 2, "num_steps": 3}
METHODS: dict[str, Callable[[], MergeMethod]] = {
    "safe_merge": lambda: SafeMerge(scoring_rank=4, **RANKS),
    "safe_share": lambda: SafeShare(scoring_rank=2, shared_rank=3),
    "nufilt": lambda: NUFILT(null_rank=3, **RANKS),
    "opcm": OPCM,
    "tsv_m": TSVM,
    "iso_c": IsoC,
    "knots": KnOTSTies,
    "ties": TiesMerging,
    "wudi": lambda: WUDIMerging(num_steps=3),
    "task_arithmetic": TaskArithmetic,
    "naive": NaiveAccumulation,
}
BOUND = 0.01  # the tiny fine-tunes have a response of 0.05 to 0.3
each_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


def folded(method: MergeMethod, *seeds: int, **options: Any) -> ContinualMerger:
    base = tower()
    merger = ContinualMerger(base, method, **options)
    for seed in seeds:
        merger.fold(tuned(base, seed), f"task{seed}")
    return merger


def response_of(merged: Tensors, method: MergeMethod) -> float:
    """The literal form over what a method merges and multiplies with, and over the biases that it merges."""
    base = tower()
    names = only_weights(base)
    if method.merges_rest or method.scope in ("linear", "matrix"):
        names = [name for name in base if base[name].ndim == 2 and "position" not in name]
    of_matrices = response([merged[name] - base[name] for name in names], [base[name] for name in names])
    if not method.merges_rest:
        return of_matrices
    biases = [name for name in base if name.endswith("bias")]
    before, after = (torch.cat([weights[name].double() for name in biases]) for weights in (base, merged))
    return max(of_matrices, float((after - before).norm() / before.norm()))


@each_method
def test_the_deployed_vector_is_the_accumulated_one_scaled_to_the_bound(make: Callable[[], MergeMethod]) -> None:
    free, bounded = folded(make(), 1, 2, max_response=None), folded(make(), 1, 2, max_response=BOUND)
    report = bounded.reports[-1]
    assert report.response is not None
    assert report.response == pytest.approx(response_of(free.merged, make()), rel=1e-4)
    assert report.scale == pytest.approx(BOUND / report.response, abs=2**-20)
    assert report.scale < 1
    assert bounded.scale == report.scale
    base = tower()
    for name, tensor in free.merged.items():  # everything that the method merges, vectors too
        if tensor.is_floating_point():
            wanted = base[name] + report.scale * (tensor - base[name])
            torch.testing.assert_close(bounded.merged[name], wanted, rtol=0, atol=1e-6)
    assert response_of(bounded.merged, make()) <= BOUND * (1 + 1e-4)


@each_method
def test_a_method_sees_the_unscaled_vector(make: Callable[[], MergeMethod]) -> None:
    free, bounded = folded(make(), 1, 2, 3, max_response=None), folded(make(), 1, 2, 3, max_response=BOUND)
    assert_same(dict(bounded.accumulated_parameters()), dict(free.merged_parameters()))


@each_method
def test_a_bound_that_is_not_reached_changes_no_bit(make: Callable[[], MergeMethod]) -> None:
    free, wide = folded(make(), 1, 2, max_response=None), folded(make(), 1, 2, max_response=1e6)
    assert wide.fingerprint() == free.fingerprint()
    assert_same(wide.merged, free.merged)
    assert (wide.scale, free.reports[-1].response) == (1.0, None)


@each_method
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_a_bounded_merge_goes_on_where_it_was_saved(
    make: Callable[[], MergeMethod], on_disk: bool, tmp_path: Path
) -> None:
    base = folder_of(tmp_path / "base", tower(), config={"model_type": "clip_vision_model"})
    models = [as_file(tuned(tower(), seed), tmp_path / f"model{seed}") for seed in (1, 2, 3)]
    whole = ContinualMerger(base, make(), max_response=BOUND)
    for seed, model in enumerate(models):
        whole.fold(model, f"task{seed}")
    options: dict[str, Any] = {"workspace": tmp_path / "work"} if on_disk else {}
    part = ContinualMerger(base, make(), max_response=BOUND, **options)
    for seed, model in enumerate(models[:2]):
        part.fold(model, f"task{seed}")
    part.save(tmp_path / "out")
    state = json.loads((tmp_path / "out" / "merge_state.json").read_text())
    assert state["max_response"] == BOUND
    again = ContinualMerger.load(tmp_path / "out", base, max_response=BOUND, **options)
    assert again.fingerprint() == part.fingerprint()
    assert_same(again.merged, part.merged)
    again.fold(models[2], "task2")
    assert again.fingerprint() == whole.fingerprint()
    assert_same(again.merged, whole.merged)


@pytest.mark.parametrize("change", [0.001, 0.1])
def test_the_larger_response_of_matrices_and_biases_counts(change: float) -> None:
    """A sum of experts may go far in what it adds to every input, while its matrices hardly change."""
    base = tower()
    incoming = {name: tensor * (1 + change) if name.endswith("bias") else tensor for name, tensor in base.items()}
    incoming[FC1] = base[FC1] * 1.05
    merger = ContinualMerger(base, TaskArithmetic(scaling=1.0), max_response=BOUND)
    report = merger.fold(incoming, "a")
    names = [name for name in base if base[name].ndim == 2 and "position" not in name]
    of_matrices = response([incoming[n] - base[n] for n in names], [base[n] for n in names])
    assert report.response == pytest.approx(max(change, of_matrices), rel=1e-4)
    assert (change > of_matrices) == (change == 0.1)
    assert report.scale == pytest.approx(BOUND / max(change, of_matrices), abs=2**-20)


def test_the_folder_holds_deployed_weights_beside_unscaled_masters(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    base = folder_of(tmp_path / "base", tower(), config={"model_type": "clip_vision_model"})
    merger = ContinualMerger(base, Add(), max_response=BOUND)
    merger.fold(tuned(tower(), 1), "a")
    merger.save(tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), merger.merged)
    masters = load_file(tmp_path / "out" / "merge_master.safetensors")
    torch.testing.assert_close(masters[FC1], tuned(tower(), 1)[FC1], rtol=0, atol=1e-7)
    card, line = (tmp_path / "out" / "README.md").read_text(), json.loads(merger.ledger[0])
    report = merger.reports[0]
    assert f"bound: response at most {BOUND:g}; unscaled it is {report.response:.4g}" in card
    assert (line["response"], line["scale"]) == (report.response, report.scale)
    assert line["merged"] == merger.fingerprint()


@pytest.mark.parametrize(("then", "now"), [(BOUND, None), (None, BOUND), (BOUND, 2 * BOUND)])
def test_another_bound_is_refused_and_nothing_is_lost(then: float | None, now: float | None, tmp_path: Path) -> None:
    folder_of(tmp_path / "base", tower(), config={"model_type": "clip_vision_model"})
    merger = ContinualMerger(tmp_path / "base", Add(), max_response=then)
    merger.fold(tuned(tower(), 1), "a")
    merger.save(tmp_path / "out")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(CheckpointError, match=f"made with `max_response` {then}, not {now}; use the same"):
        ContinualMerger.load(tmp_path / "out", tmp_path / "base", method=Add(), max_response=now)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files


@pytest.mark.parametrize("bound", [0, -1.0, math.inf, math.nan, "wide", True])
def test_a_bound_that_is_none_is_refused(bound: Any) -> None:
    with pytest.raises(ValueError, match="`max_response` must be a finite number above 0"):
        ContinualMerger(tower(), Add(), max_response=bound)


def test_tasks_that_change_nothing_have_no_response() -> None:
    base = tower()
    merger = ContinualMerger(base, Add(), max_response=BOUND)
    report = merger.fold(base, "same")
    assert (report.response, report.scale) == (0.0, 1.0)
    assert_same(merger.merged, ContinualMerger(base, Add()).merged)


def test_the_method_says_its_own_bound() -> None:
    assert ContinualMerger(tower(), SafeShare(scoring_rank=2, shared_rank=3)).max_response == 0.035
    assert ContinualMerger(tower(), SafeShare(scoring_rank=2, shared_rank=3), max_response=None).max_response is None
    assert ContinualMerger(tower(), SafeMerge()).max_response is None


def train(module: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for parameter, change in zip(module.parameters(), tuned(module.state_dict(), seed).values(), strict=True):
            parameter.copy_(change)


def small_module() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return module


@pytest.mark.parametrize("restart_from", ["pretrained", "merged"])
def test_a_module_holds_the_deployed_weights_and_training_goes_on_from_a_state(restart_from: Any) -> None:
    options: dict[str, Any] = {"layers": ["*weight"], "max_response": 1e-3, "restart_from": restart_from}

    def run(merger: LiveMerger, module: nn.Module, seeds: tuple[int, ...]) -> None:
        for seed in seeds:
            merger.restart()
            train(module, seed)
            merger.fold_trained(f"task{seed}")

    module = small_module()
    whole = LiveMerger(module, Add(), **options)
    run(whole, module, (1, 2, 3))
    assert whole.reports[-1].scale < 1
    assert_same(copied(module.state_dict()), whole.merged)
    other = small_module()
    part = LiveMerger(other, Add(), **options)
    run(part, other, (1, 2))
    fresh = small_module()
    again = LiveMerger(fresh, Add(), **options)
    again.load_training_state(part.training_state())
    again.apply_merged()
    run(again, fresh, (3,))
    assert again.fingerprint() == whole.fingerprint()
