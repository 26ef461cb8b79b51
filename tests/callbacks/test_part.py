"""Which part of a module is merged."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.callbacks import MergeCallback
from safemerge_pl.callbacks.part import MergePart, require_started
from safemerge_pl.methods import SafeMerge
from safemerge_pl.module import ContinualMergeModule

Make = Callable[..., Any]


@pytest.mark.parametrize("path", ["backbone.nothing", "backbone.merged_attr"])
def test_module_attr_must_name_a_module(path: str, small_data: Make, make_trainer: Make, merge_callback: Make) -> None:
    with pytest.raises(MisconfigurationException, match=f"`module_attr` '{path}'"):
        make_trainer(merge_callback(module_attr=path)).fit(ContinualMergeModule(), small_data())


def test_the_target_is_what_the_backbone_names_or_the_whole_module() -> None:
    module = ContinualMergeModule()
    module.configure_model()
    assert MergePart(SafeMerge()).target(module) is module.backbone.vision_model
    other = L.LightningModule()
    assert MergePart(SafeMerge()).target(other) is other
    other.deep = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    assert MergePart(SafeMerge(), module_attr="deep.0").target(other) is other.deep[0]


def test_the_device_is_the_modules_or_the_one_that_is_named() -> None:
    module = L.LightningModule()
    assert MergePart(SafeMerge()).choose_device(module) == torch.device("cpu")
    assert MergePart(SafeMerge(), device="meta").choose_device(module) == torch.device("meta")


def test_a_part_cannot_be_changed_while_modes_hold_it() -> None:
    merge = MergeCallback(layers=["a"], on_mismatch="pretrained", device="cpu", module_attr="x")
    assert (merge.layers, merge.on_mismatch, merge.device, merge.module_attr) == (["a"], "pretrained", "cpu", "x")
    with pytest.raises(AttributeError):
        merge.part.device = "cuda"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        merge.method = SafeMerge()  # type: ignore[misc]


def test_nothing_can_be_asked_of_a_merge_that_has_not_started() -> None:
    with pytest.raises(RuntimeError, match="`setup` was not called for stage 'fit'"):
        require_started(None)
    assert require_started(0) == 0
