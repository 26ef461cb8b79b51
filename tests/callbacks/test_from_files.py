"""Streams of checkpoints that cannot be merged, or not be resumed: refused before anything changes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file, save_file
from small import TASKS, tower
from streams import assert_same_weights, checkpoint_after_two

from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.zoo import FILES

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("data_args", "merge_args", "message"),
    [
        ({}, {"keep_ratio": 0.3}, "keep_ratio: 0.5 then, 0.3 now"),
        ({"tasks": ["weather", "font_category", "mnist"]}, {}, "same order"),
        ({"controls": ["fashion"]}, {}, "control sets"),
        ({}, {"layers": ["*.q_proj.weight"]}, "made of other layers than are chosen now"),
    ],
)
def test_resume_refuses_what_changed(
    data_args: dict[str, Any],
    merge_args: dict[str, Any],
    message: str,
    module: ContinualMergeModule,
    small_data: Make,
    make_trainer: Make,
    merge_callback: Make,
    tmp_path: Path,
) -> None:
    """Never half a stream with one setting and half with another."""
    path = checkpoint_after_two(
        module, small_data(), make_trainer(merge_callback(), max_epochs=2), tmp_path / "two.ckpt"
    )
    with pytest.raises(MisconfigurationException, match=message):
        make_trainer(merge_callback(**merge_args)).fit(ContinualMergeModule(), small_data(**data_args), ckpt_path=path)


def test_module_with_merged_weights_is_no_pretrained_model(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    make_trainer(merge_callback(), max_epochs=1).fit(module, small_data())
    with pytest.raises(MisconfigurationException, match="already holds a merge of font_category"):
        make_trainer(merge_callback()).fit(module, small_data())


def test_every_problem_is_listed_before_anything_changes(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """NaN, a missing tensor and a wrong shape in three experts, in one message."""
    experts = {task: tmp_path / task for task in TASKS}
    for task, folder in experts.items():
        shutil.copytree(FILES / "experts" / task, folder)
        tensors = load_file(folder / "model.safetensors")
        name = "vision_model.encoder.layers.2.mlp.fc1.weight"
        if task == "font_category":
            tensors[name][3, 4] = torch.nan
        elif task == "weather":
            del tensors[name]
        else:
            tensors[name] = tensors[name][:-1].contiguous()
        save_file(tensors, folder / "model.safetensors")
    module.configure_model()
    before = tower(module)
    merge = merge_callback(experts={task: str(path) for task, path in experts.items()})
    with pytest.raises(MisconfigurationException) as caught:
        make_trainer(merge).fit(module, small_data())
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "font_category" in lines[0]
    assert "1 NaN or Inf among 65536 values" in lines[0]
    assert "lacks 1 of 30 tensors" in lines[1]
    assert "(511, 128)" in lines[2]
    assert str(experts["mnist"]) in lines[2]
    assert all(torch.equal(tensor, before[name]) for name, tensor in tower(module).items())


def test_missing_experts_and_misspelt_tasks(small_data: Make, make_trainer: Make, merge_callback: Make) -> None:
    with pytest.raises(MisconfigurationException, match=r"task 'weather' has no model: nowhere/weather not found"):
        make_trainer(merge_callback(experts="nowhere")).fit(ContinualMergeModule(), small_data())
    with pytest.raises(MisconfigurationException, match="names no model for mnist"):
        make_trainer(merge_callback(experts={"font_category": "a", "weather": "b"})).fit(
            ContinualMergeModule(), small_data()
        )
    with pytest.raises(ValueError, match="did you mean 'mnist'"):
        small_data(["minst"])


@pytest.mark.parametrize(
    ("trainer_args", "message"),
    [
        ({"max_epochs": 4}, "`max_epochs` is 4 but the stream has 3 tasks"),
        ({"max_epochs": -1}, "set it to 3, or less to stop early"),
        ({"limit_train_batches": 0}, "no epoch would run"),
        ({"precision": "bf16-true"}, "half precision"),
    ],
)
def test_trainers_that_cannot_merge(
    trainer_args: dict[str, Any], message: str, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        make_trainer(merge_callback(), **trainer_args).fit(ContinualMergeModule(), small_data())


def test_a_bounded_stream_is_resumed_to_the_bit(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """The module holds what is deployed; the whole accumulated vector is in the callback's state."""
    whole = merge_callback(max_response=0.02)
    make_trainer(whole).fit(module, small_data())
    assert whole.merger is not None
    assert whole.merger.scale < 1
    assert_same_weights(module, whole.merger)
    first = ContinualMergeModule()
    trainer = make_trainer(merge_callback(max_response=0.02), max_epochs=2)
    path = checkpoint_after_two(first, small_data(), trainer, tmp_path / "two.ckpt")
    again, resumed = ContinualMergeModule(), merge_callback(max_response=0.02)
    make_trainer(resumed).fit(again, small_data(), ckpt_path=path)
    assert resumed.merger is not None
    assert resumed.merger.fingerprint() == whole.merger.fingerprint()
    assert_same_weights(again, whole.merger)
    with pytest.raises(MisconfigurationException, match=r"made with `max_response` 0\.02, not 0\.03; use the same"):
        make_trainer(merge_callback(max_response=0.03)).fit(ContinualMergeModule(), small_data(), ckpt_path=path)


def test_a_bound_that_is_none_is_refused_at_once(merge_callback: Make) -> None:
    with pytest.raises(ValueError, match="`max_response` must be a finite number above 0"):
        merge_callback(max_response=0.0)
