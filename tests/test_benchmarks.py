"""Every part of the benchmarks runs, on sizes that tell nothing about speed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # they are no part of the package

from benchmarks import __main__ as command
from benchmarks import cost, out_of_core, scaling
from safemerge_pl.maths import linalg


def rows_of(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[dict[str, Any]]:
    """What a part writes."""
    output = tmp_path / "results.json"
    monkeypatch.chdir(Path(__file__).parent.parent)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--output", str(output), part, *options])
    command.main()
    content = json.loads(output.read_text())
    assert torch.__version__.startswith(content["environment"]["torch"])
    rows: list[dict[str, Any]] = content[part]
    return rows


def test_the_literal_form_is_timed_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("literal", tmp_path, monkeypatch, "--width", "24", "--layers", "3")
    assert [row["shape"] for row in rows] == ["3 x 24 x 24", "1 x 96 x 24"]
    assert all(row["ratio"] == row["literal_s"] / row["ours_s"] > 0 for row in rows)


def test_growth_varies_one_thing_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_START", scaling._START | {"blocks": 1, "width": 16})
    monkeypatch.setattr(scaling, "_VARIED", {"blocks": [1, 2], "task_rank": [1, 3]})
    rows = rows_of("scaling", tmp_path, monkeypatch)
    assert [(row["varied"], row["value"]) for row in rows] == [
        ("blocks", 1),
        ("blocks", 2),
        ("task_rank", 1),
        ("task_rank", 3),
    ]
    assert all(row["seconds"] > 0 for row in rows)


def test_the_cost_model_is_fitted_checked_and_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which is the only one that folds."""
    monkeypatch.setattr(cost, "_FITTED", [(16, 1, 1), (16, 2, 1), (32, 1, 1)])
    monkeypatch.setattr(cost, "_CHECKED", [(32, 2, 1)])
    monkeypatch.setattr(cost.mp, "start_processes", lambda work, given, **_: work(0, *given))
    threads = torch.get_num_threads()
    try:
        rows = rows_of("cost", tmp_path, monkeypatch)
    finally:
        torch.set_num_threads(threads)
    assert [row["kind"] for row in rows if "kind" in row] == ["fit"] * 6 + ["check"] * 2
    assert all(row["ratio"] == row["predicted_s"] / row["measured_s"] for row in rows if "kind" in row)
    hours = [row["hours"] for row in rows if row.get("nodes") == 1]
    assert len(hours) == 3
    assert hours == sorted(hours)


def test_rates_of_costs_are_found_again_and_none_is_negative() -> None:
    folds = [cost.Fold(*parts) for parts in ((1, 0, 0, 0), (2, 1, 0, 0), (1, 2, 1, 1), (3, 1, 2, 1), (1, 1, 0, 4))]
    rates, start = cost.fit(folds, [2 * sum(fold.values()) + 1 for fold in folds])
    assert [*rates, start] == pytest.approx([2, 2, 2, 1])
    rates, start = cost.fit(folds, [10 + fold.operations - fold.messages for fold in folds])
    assert min(*rates, start) >= 0


def test_each_rival_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--width", "16", "--blocks", "1", "--steps", "2", "--methods", "WUDI-Merging", "SAFE-Share"]
    rows = rows_of("rivals", tmp_path, monkeypatch, *options)
    assert [row["method"] for row in rows] == ["WUDI-Merging", "SAFE-Share"]
    assert all(min(row["ours_s"], row["ours_cpu_s"]) > 0 and 0 < row["ours_mib"] < 1024 for row in rows)


def test_two_processes_end_with_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = rows_of("processes", tmp_path, monkeypatch, "--width", "16", "--blocks", "1")
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["merged"] == two["merged"]


def test_models_larger_than_memory_are_folded_and_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"_HIDDEN": 32, "_KV": 16, "_FEED": 64, "_VOCABULARY": 50}.items():
        monkeypatch.setattr(out_of_core, name, size)
    rows = rows_of("out_of_core", tmp_path, monkeypatch, "--llama_layers", "1", "2", "--scratch", str(tmp_path))
    assert [row["layers"] for row in rows] == [1, 2]
    assert 0 < rows[0]["peak_rss_gib"] < 2
    assert (tmp_path / "out_of_core.png").stat().st_size > 10_000


def test_torchrun_folds_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"_HIDDEN": 32, "_KV": 16, "_FEED": 64, "_VOCABULARY": 50}.items():
        monkeypatch.setattr(out_of_core, name, size)
    options = ["--llama_layers", "1", "--scratch", str(tmp_path), "--processes", "2"]
    (row,) = rows_of("together", tmp_path, monkeypatch, *options, "--fold_options", "--method", "OPCM")
    assert row["processes"] == 2
    assert row["busiest_cpu_seconds"] > 0 < row["peak_rss_gib"] < 2
    assert len(row["merged"]) == 12


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_part_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no GPU here"):
        rows_of("gpu", tmp_path, monkeypatch)


def test_the_part_for_a_gpu_runs_its_checks_and_times_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("gpu", tmp_path, monkeypatch, "--device", "cpu", "--tiny")
    checks = [row for row in rows if "passed" in row]
    assert {row["what"].split(",")[0] for row in checks} == {"masks", "same bits twice"}
    assert all(row["passed"] for row in checks)
    masks = [row for row in checks if row["what"] == "masks"]
    assert {row["of"].split(",")[0] for row in masks} == {"zoo", "random", "noise", "rank 8"}
    times = [row for row in rows if row["what"].startswith("8 tasks")]
    assert [row["what"] for row in times] == ["8 tasks, SAFE-Merge"] * 2 + ["8 tasks, SAFE-Share"] * 2
    for row in times:
        parts = [row["decompositions_s"], row["solver_s"], row["rest_s"]]
        assert sum(parts) == pytest.approx(row["seconds"])
        assert parts[0] > 0
        assert (parts[1] > 0) == ("Merge" in row["what"])
    assert all(row["in_full"] == 0 for row in times[::2])  # the iteration has run, and sufficed


def test_masks_that_are_not_the_cpus_end_the_part_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = linalg._leading_basis
    monkeypatch.setattr(linalg, "_leading_basis", lambda matrices, rank: right(matrices, rank).roll(1, 1))
    with pytest.raises(SystemExit, match=r"(?s)A check has failed:\n.*'masks'.*'passed': False"):
        rows_of("gpu", tmp_path, monkeypatch, "--device", "cpu", "--tiny")
