"""The accuracy matrix: its numbers by hand, its state through saving, moving and copying."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from safemerge_pl.metrics import AccuracyMatrix

ROWS = [
    {"a": 0.9, "p": 0.5, "q": 0.3},
    {"a": 0.7, "b": 0.8, "p": 0.4, "q": 0.4},
    {"a": 0.5, "b": 0.9, "c": 0.6, "p": 0.2, "q": 0.4},
]


def filled(steps: int = 3, **kwargs: Any) -> AccuracyMatrix:
    matrix = AccuracyMatrix(["a", "b", "c"], ["p", "q"], **kwargs)
    for step, row in enumerate(ROWS[:steps], 1):
        matrix.update(step, row)
    return matrix


def values(numbers: dict[str, Tensor]) -> dict[str, float]:
    return {name: number.item() for name, number in numbers.items()}


EXPECTED = [
    {"ACC": 0.9, "BWT": float("nan"), "Gen": 0.4, "H": 2 * 0.9 * 0.4 / 1.3},
    {"ACC": 0.75, "BWT": -0.2, "Gen": 0.4, "H": 2 * 0.75 * 0.4 / 1.15},
    {"ACC": 2.0 / 3, "BWT": (-0.4 + 0.1) / 2, "Gen": 0.3, "H": 2 * (2.0 / 3) * 0.3 / (2.0 / 3 + 0.3)},
]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_numbers_of_a_stream_by_hand(steps: int) -> None:
    """BWT of one task is undefined."""
    matrix = filled(steps)
    assert matrix.steps == steps
    assert values(matrix.compute()) == pytest.approx(EXPECTED[steps - 1], abs=1e-12, nan_ok=True)


def test_called_as_a_function_it_gives_the_numbers_after_each_merge() -> None:
    """BWT too, which needs the rows of the merges before."""
    matrix = AccuracyMatrix(["a", "b", "c"], ["p", "q"])
    found = [values(matrix(step, row)) for step, row in enumerate(ROWS, 1)]
    assert found == [pytest.approx(expected, abs=1e-12, nan_ok=True) for expected in EXPECTED]
    assert values(matrix.compute()) == pytest.approx(EXPECTED[2], abs=1e-12)
    assert matrix.steps == 3


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_numbers_of_an_earlier_merge_stay_what_they_were(step: int) -> None:
    assert values(filled().at(step)) == pytest.approx(EXPECTED[step - 1], abs=1e-12, nan_ok=True)


def test_before_the_first_merge_everything_is_undefined() -> None:
    """Never 0; torchmetrics warns."""
    matrix = AccuracyMatrix(["a"], ["p"])
    assert matrix.steps == 0
    assert all(number.isnan() for number in matrix.at(0).values())
    with pytest.warns(UserWarning, match="was called before the ``update``"):
        assert all(number.isnan() for number in matrix.compute().values())


def test_a_task_that_was_not_scored_makes_the_average_undefined() -> None:
    """An empty loader must not lift or lower the mean."""
    matrix = AccuracyMatrix(["a", "b"], ["p"])
    matrix.update(2, {"a": 0.5, "p": 0.5})
    numbers = matrix.compute()
    assert numbers["ACC"].isnan()
    assert numbers["BWT"].isnan()
    assert numbers["H"].isnan()
    assert numbers["Gen"].item() == 0.5


def test_without_control_sets_general_and_h_are_undefined() -> None:
    matrix = AccuracyMatrix(["a", "b"])
    matrix.update(1, {"a": 0.5})
    numbers = matrix.compute()
    assert numbers["ACC"].item() == 0.5
    assert numbers["Gen"].isnan()
    assert numbers["H"].isnan()


def test_h_is_zero_where_a_term_is() -> None:
    matrix = AccuracyMatrix(["a"], ["p"])
    matrix.update(1, {"a": 0.0, "p": 0.0})
    assert matrix.compute()["H"].item() == 0.0


def test_zero_shot_accuracies_of_later_tasks_count_for_nothing() -> None:
    matrix = filled()
    matrix.update(1, {"b": 0.1, "c": 0.2})
    matrix.update(2, {"c": 0.3})
    assert values(matrix.compute()) == pytest.approx(EXPECTED[2], abs=1e-12)
    assert values(matrix.at(2)) == pytest.approx(EXPECTED[1], abs=1e-12)


def test_a_row_may_be_entered_in_parts_and_again() -> None:
    matrix = AccuracyMatrix(["a", "b"], ["p"])
    matrix.update(1, {"a": 0.1})
    matrix.update(1, {"p": torch.tensor(0.25)})
    matrix.update(1, {"a": 0.75})
    assert values(matrix.compute()) == pytest.approx(
        {"ACC": 0.75, "BWT": float("nan"), "Gen": 0.25, "H": 0.375}, nan_ok=True
    )


def test_rows_are_merges_and_columns_tasks() -> None:
    matrix = filled(2)
    assert matrix.accuracy[1, 0].item() == 0.7
    assert matrix.accuracy[0, 1].isnan()
    assert matrix.general.shape == (3, 2)
    assert matrix.general[1].tolist() == [0.4, 0.4]


@pytest.mark.parametrize("share", [1.0000001, 70.0, -1.1, float("nan"), float("inf"), torch.tensor(71.5)])
def test_a_value_that_is_no_share_is_refused(share: Any) -> None:
    """Percent by mistake, or a mean over nothing."""
    with pytest.raises(
        ValueError, match=r"the accuracy of 'b' must be in \[0, 1\] \(a correlation in \[-1, 1\]\), got"
    ):
        filled(1).update(2, {"b": share})


def test_a_correlation_may_be_negative() -> None:
    """STSB's Spearman enters ACC as it is; a harmonic mean of signs that differ is no mean, so H is 0."""
    matrix = AccuracyMatrix(["a", "b"], ["p"])
    matrix.update(1, {"a": -0.5, "p": 0.49})
    assert values(matrix.compute())["ACC"] == -0.5
    assert values(matrix.compute())["H"] == 0.0
    matrix.update(2, {"a": -0.25, "b": 0.75, "p": 0.25})
    assert values(matrix.compute()) == pytest.approx({"ACC": 0.25, "BWT": 0.25, "Gen": 0.25, "H": 0.25})


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'x' is neither a task \(a, b, c\) nor a control set"):
        filled(1).update(2, {"x": 0.5})


@pytest.mark.parametrize("step", [0, -1, 4])
def test_a_step_out_of_range_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=rf"`step` must be in \[1, 3\], got {step}"):
        filled(1).update(step, {"a": 0.5})


@pytest.mark.parametrize("row", [{"a": 0.1, "x": 0.5}, {"a": 0.1, "b": 1.5}])
def test_a_refused_row_changes_nothing(row: dict[str, float]) -> None:
    matrix = filled(1)
    before = matrix.accuracy.clone()
    with pytest.raises(ValueError, match=r"'[xb]'"):
        matrix.update(1, row)
    assert torch.equal(matrix.accuracy.nan_to_num(-1), before.nan_to_num(-1))


@pytest.mark.parametrize(
    ("tasks", "controls"), [(["a", "dtd", "dtd"], []), (["a"], ["dtd", "dtd"]), (["a", "dtd"], ["dtd"])]
)
def test_names_must_be_distinct(tasks: list[str], controls: list[str]) -> None:
    """Two rows of the table would collapse into one."""
    with pytest.raises(ValueError, match="dtd"):
        AccuracyMatrix(tasks, controls)


# states


def test_the_matrix_is_part_of_the_modules_state(tmp_path: Path) -> None:
    """Saved and read with weights_only."""
    module = nn.ModuleDict({"matrix": filled(2)})
    torch.save(module.state_dict(), tmp_path / "m.pt")
    again = nn.ModuleDict({"matrix": AccuracyMatrix(["a", "b", "c"], ["p", "q"])})
    missing, unexpected = again.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert not missing
    assert not unexpected
    matrix: Any = again["matrix"]
    assert matrix.steps == 2
    assert matrix.accuracy.dtype == torch.float64
    assert values(matrix.at(2)) == pytest.approx(EXPECTED[1])
    matrix.update(3, ROWS[2])
    assert values(matrix.compute()) == pytest.approx(EXPECTED[2])


def test_a_loaded_matrix_computes_without_a_new_update() -> None:
    """A resumed run may ask for the numbers before the next merge."""
    matrix = AccuracyMatrix(["a", "b", "c"], ["p", "q"])
    matrix.load_state_dict(filled(2).state_dict())
    assert values(matrix.compute()) == pytest.approx(EXPECTED[1])


def test_reset_forgets_everything() -> None:
    matrix = filled()
    matrix.reset()
    assert matrix.steps == 0
    assert matrix.accuracy.isnan().all()
    matrix.update(1, ROWS[0])
    assert values(matrix.compute()) == pytest.approx(EXPECTED[0], nan_ok=True)


def test_the_cache_follows_an_update() -> None:
    matrix = filled(2)
    assert values(matrix.compute()) == pytest.approx(EXPECTED[1])
    matrix.update(3, ROWS[2])
    assert values(matrix.compute()) == pytest.approx(EXPECTED[2])


def test_states_are_not_reduced_over_processes() -> None:
    """The values are global already: a second reduction would count them twice."""

    def never(*args: object, **kwargs: object) -> list[Tensor]:
        raise AssertionError("the state was synchronised")

    matrix = filled(dist_sync_fn=never, distributed_available_fn=lambda: True)
    assert values(matrix.compute()) == pytest.approx(EXPECTED[2])


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "float": lambda module: module.float(),
    "to half": lambda module: module.to(torch.float16),
    "to cpu": lambda module: module.to("cpu"),
    "to cpu as bfloat16": lambda module: module.to("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("inside", [False, True])
def test_no_conversion_lowers_the_precision(conversion: str, inside: bool) -> None:
    """What Lightning's precision plugins do to a module."""
    matrix = filled(2)
    outer = nn.Sequential(nn.Linear(1, 1), matrix)
    CONVERSIONS[conversion](outer if inside else matrix)
    matrix.update(3, ROWS[2])
    assert matrix.accuracy.dtype == torch.float64
    assert values(matrix.compute()) == pytest.approx(EXPECTED[2], abs=1e-12)


def test_autocast_does_not_lower_the_precision() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert values(filled().compute()) == pytest.approx(EXPECTED[2], abs=1e-12)


@pytest.mark.parametrize("copy_of", [lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.clone(), copy.deepcopy])
def test_a_copy_has_the_values_and_a_life_of_its_own(copy_of: Callable[[AccuracyMatrix], AccuracyMatrix]) -> None:
    matrix = filled(2)
    again = copy_of(matrix)
    assert (again.tasks, again.controls, again.steps) == (matrix.tasks, matrix.controls, 2)
    again.update(3, ROWS[2])
    assert values(again.compute()) == pytest.approx(EXPECTED[2])
    assert matrix.steps == 2
    assert values(matrix.compute()) == pytest.approx(EXPECTED[1])
