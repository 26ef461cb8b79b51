"""ACC, BWT, Gen. and H-score against numbers worked out by hand."""

import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from safemerge_pl.functional import (
    SCORES,
    average_accuracy,
    backward_transfer,
    general_average,
    h_score,
    summarise,
)

NAN = float("nan")
# row = merge, column = task; tasks not merged yet are not measured
LOWER = [[0.9, NAN, NAN], [0.7, 0.8, NAN], [0.5, 0.9, 0.6]]
# the same with zero-shot accuracies above the diagonal, which count for nothing
FULL = [[0.9, 0.1, 0.2], [0.7, 0.8, 0.3], [0.5, 0.9, 0.6]]


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("matrix", [LOWER, FULL])
def test_average_accuracy_is_the_mean_of_the_last_row(matrix: list[list[float]]) -> None:
    assert average_accuracy(tensor(matrix)).item() == pytest.approx((0.5 + 0.9 + 0.6) / 3, abs=1e-12)


@pytest.mark.parametrize("matrix", [LOWER, FULL])
def test_backward_transfer_is_last_row_less_diagonal_without_the_last_task(matrix: list[list[float]]) -> None:
    """Task 1 lost 0.4, task 2 gained 0.1; the last task has had no later merge."""
    assert backward_transfer(tensor(matrix)).item() == pytest.approx((-0.4 + 0.1) / 2, abs=1e-12)


def test_forgetting_is_negative_and_gain_positive() -> None:
    """A score that falls counts negative."""
    assert backward_transfer(tensor([[0.9, NAN], [0.4, 0.8]])).item() == pytest.approx(-0.5)
    assert backward_transfer(tensor([[0.4, NAN], [0.9, 0.8]])).item() == pytest.approx(0.5)


def test_backward_transfer_reads_rows_as_merges() -> None:
    """The transposed matrix gives another number."""
    assert backward_transfer(tensor(FULL).T).item() == pytest.approx(((0.2 - 0.9) + (0.3 - 0.8)) / 2)


def test_backward_transfer_does_not_stop_early() -> None:
    """With four tasks three can be forgotten, the third too."""
    matrix = tensor([[0.8] * 4, [0.8] * 4, [0.8] * 4, [0.8, 0.8, 0.2, 0.9]])
    assert backward_transfer(matrix).item() == pytest.approx(-0.6 / 3)


@pytest.mark.parametrize("size", [0, 1])
def test_backward_transfer_of_fewer_than_two_tasks_is_undefined(size: int) -> None:
    """Neither 0 nor an error."""
    assert backward_transfer(torch.full((size, size), 0.9)).isnan()


def test_the_average_of_one_task_is_its_accuracy_and_of_none_undefined() -> None:
    assert average_accuracy(tensor([[0.25]])).item() == 0.25
    assert average_accuracy(torch.zeros(0, 0)).isnan()


@pytest.mark.parametrize("number", [average_accuracy, backward_transfer])
def test_a_value_that_was_not_measured_makes_the_number_undefined(number: object) -> None:
    """Never taken for 0, never left out of the mean."""
    assert number(tensor([[0.9, NAN], [NAN, 0.8]])).isnan()  # type: ignore[operator]


@pytest.mark.parametrize("number", [average_accuracy, backward_transfer])
@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (4,), (1, 2, 2), ()])
def test_a_matrix_that_is_not_square_is_refused(number: object, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"`accuracy` must be square \(T, T\), got shape"):
        number(torch.zeros(shape))  # type: ignore[operator]


def test_general_average_is_the_mean_over_the_control_sets() -> None:
    assert general_average(tensor([0.5, 0.25, 0.75])).item() == 0.5
    assert general_average(tensor([[0.5, 0.25], [1.0, 0.0]])).tolist() == [0.375, 0.5]
    assert general_average(tensor([])).isnan()
    assert general_average(tensor([0.5, NAN])).isnan()


@pytest.mark.parametrize(
    ("acc", "gen", "expected"),
    [(0.5, 0.5, 0.5), (0.75, 0.25, 0.375), (75.0, 25.0, 37.5), (1.0, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.0)],
)
def test_h_score_is_the_harmonic_mean(acc: float, gen: float, expected: float) -> None:
    """0 where a term is 0, also where both are; in any unit."""
    assert h_score(tensor(acc), tensor(gen)).item() == expected
    assert h_score(tensor(gen), tensor(acc)).item() == expected


def test_h_score_works_entry_by_entry_and_keeps_undefined_values() -> None:
    found = h_score(tensor([0.5, 0.0, NAN, 0.5]), tensor([0.25, 0.0, 0.5, NAN]))
    assert found[:2].tolist() == pytest.approx([1 / 3, 0.0])
    assert found[2:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    matrix = torch.full((2, 2), 0.5, dtype=dtype)
    assert average_accuracy(matrix).dtype == backward_transfer(matrix).dtype == dtype
    assert general_average(matrix[0]).dtype == h_score(matrix[0], matrix[1]).dtype == dtype


def test_inputs_are_not_changed() -> None:
    matrix = tensor(FULL)
    average_accuracy(matrix), backward_transfer(matrix), general_average(matrix[0]), h_score(matrix[0], matrix[1])
    assert torch.equal(matrix, tensor(FULL))


@pytest.mark.parametrize("count", [2, 3, 8, 20])
def test_the_summary_has_the_bits_that_plain_sums_give(count: int) -> None:
    """Studies keep these numbers on disk: they must be found again to the last bit."""
    draw = random.Random(count)
    tasks, controls, first = ([draw.randint(0, 1000) / 1000 for _ in range(count)] for _ in range(3))
    found = summarise(tasks, controls, first)
    acc, gen = sum(tasks) / count, sum(controls) / count
    bwt = sum(a - b for a, b in zip(tasks[:-1], first[:-1], strict=True)) / (count - 1)
    assert found == {"ACC": acc, "Gen": gen, "H": 2 * acc * gen / (acc + gen), "BWT": bwt}
    assert tuple(found) == SCORES


def test_the_summary_equals_the_tensor_functions() -> None:
    found = summarise([0.5, 0.9, 0.6], [0.25, 0.75], when_merged=[0.9, 0.8, 0.6])
    assert found == pytest.approx(
        {
            "ACC": average_accuracy(tensor(FULL)).item(),
            "Gen": general_average(tensor([0.25, 0.75])).item(),
            "H": h_score(average_accuracy(tensor(FULL)), tensor(0.5)).item(),
            "BWT": backward_transfer(tensor(FULL)).item(),
        },
        abs=1e-15,
    )


def test_the_summary_leaves_out_what_is_undefined() -> None:
    assert summarise([], []) == {}
    assert summarise([], [0.25], []) == {"Gen": 0.25}
    assert summarise([0.25], [], [0.75]) == {"ACC": 0.25}
    assert summarise([-0.5], [0.25]) == {"ACC": -0.5, "Gen": 0.25, "H": 0.0}
    with pytest.raises(ValueError, match="longer"):
        summarise([0.5], [], [0.5, 0.5])


def test_the_formulas_need_nothing_but_torch() -> None:
    code = "import sys, safemerge_pl.functional as f; print(*{n.partition('.')[0] for n in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"lightning", "torchmetrics", "transformers", "datasets", "matplotlib"} & set(loaded)
