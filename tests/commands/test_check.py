"""Pre-flight of a stream: it agrees with what a fold and its output do, and lists problems instead of raising them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from command_line import safemerge

from safemerge_pl.callbacks import ComparedMethod, MergeCallback
from safemerge_pl.commands.check import check_stream
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import SafeShare, TaskArithmetic
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.output.saving import output_size
from safemerge_pl.zoo import FILES

MERGE = "--trainer.callbacks.init_args."


def module_of(folder: Path) -> ContinualMergeModule:
    """As much of a module as a check looks at."""
    return cast(ContinualMergeModule, SimpleNamespace(backbone=SimpleNamespace(folder=lambda: folder)))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FILES / "model", tmp_path / "base"))


def test_the_check_says_what_the_output_will_need(base: Path, small_data: Callable[..., Any], tmp_path: Path) -> None:
    merge, data = MergeCallback(), small_data()
    facts, problems = check_stream(module_of(base), data, merge, tmp_path / "out")
    plan = ContinualMerger(base, merge.method).plan
    assert problems == []
    size = output_size(plan, plan.pretrained, "float32") / 2**20
    assert any(fact.startswith(f"disk for the merged model: at most {size:.0f} MiB") for fact in facts)
    assert any(f"merged: {len(plan.layers)} layers, {plan.entries / 1e6:.2f} M" in fact for fact in facts)


def test_an_output_that_would_lack_a_file_is_a_problem(
    base: Path, small_data: Callable[..., Any], tmp_path: Path
) -> None:
    """A link to a file that is gone: the output could not be written at the end of the stream."""
    (base / "vocab.txt").symlink_to(tmp_path / "gone")
    _, problems = check_stream(module_of(base), small_data(), MergeCallback(), tmp_path / "out")
    assert len(problems) == 1
    assert "merged model: " in problems[0]
    assert "vocab.txt is a link to a file that is gone" in problems[0]


def test_ranks_above_the_width_are_a_problem(base: Path, small_data: Callable[..., Any], tmp_path: Path) -> None:
    """The defaults are for ViT-B/32; the zoo is narrower."""
    compared = [ComparedMethod(TaskArithmetic()), ComparedMethod(SafeShare(scoring_rank=21), label="share")]
    _, problems = check_stream(module_of(base), small_data(), MergeCallback(), tmp_path / "out", compared)
    wide = "`shared_rank` is 192, but vision.0.up has only 128 input directions"
    assert problems == [f"`compare`: share: {wide}; give a share of the width, such as 0.25, or a smaller number."]
    _, problems = check_stream(module_of(base), small_data(), MergeCallback(SafeShare()), tmp_path / "out")
    assert problems == [f"pretrained model: {wide}; give a share of the width, such as 0.25, or a smaller number."]


def test_check_lists_every_problem_at_once(tmp_path: Path) -> None:
    args = [MERGE + "experts", '{"weather": "gone", "clipart_category": "also/gone/now"}']
    run = safemerge("check", "--config", "tiny.yaml", *args, cwd=tmp_path)
    assert run.returncode == 1
    assert "task 'weather': gone does not exist." in run.stderr
    assert "task 'clipart_category': also/gone/now does not exist." in run.stderr
    assert "2 problems found" in run.stderr
