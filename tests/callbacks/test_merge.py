"""The merge callback under a real Trainer: when it folds, what it leaves, how it resumes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small import RANKS, TASKS, tower
from streams import assert_same_weights, direct

import callbacks as alias
import safemerge_pl.callbacks as ours
from safemerge_pl.callbacks import MergeCallback, ReferenceRows, SAFEMergeCallback, StreamReport
from safemerge_pl.methods import SafeMerge, Stack, StackResult
from safemerge_pl.module import ContinualMergeModule

Make = Callable[..., Any]


class Recorder(L.Callback):
    """Notes how many tasks are merged in each hook."""

    def __init__(self, merge: MergeCallback) -> None:
        self.merge, self.seen = merge, []  # type: ignore[var-annotated]

    def on_train_start(self, *_: Any) -> None:
        self.seen.append(("train_start", len(self.merge.tasks)))

    def on_validation_start(self, *_: Any) -> None:
        self.seen.append(("validation", len(self.merge.tasks)))

    def on_train_epoch_end(self, *_: Any) -> None:
        self.seen.append(("epoch_end", len(self.merge.tasks)))


def test_alias_is_the_same_class() -> None:
    for name in ours.__all__:
        assert getattr(alias, name) is getattr(ours, name)
    assert alias.__all__ == ours.__all__


def test_folds_once_a_task_before_its_validation(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    merge = merge_callback()
    recorder = Recorder(merge)
    trainer = make_trainer(merge, recorder)
    trainer.fit(module, small_data())
    assert recorder.seen == [
        ("train_start", 0),
        *[(hook, count) for count in (1, 2, 3) for hook in ("validation", "epoch_end")],
    ]
    assert merge.tasks == module.merged_tasks == TASKS
    assert trainer.global_step == len(TASKS)
    assert_same_weights(module, direct(TASKS))


def test_parameters_keep_identity_and_the_rest_stays_pretrained(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    """Weights are written in place; every parameter that is not merged is bit for bit the pretrained one."""
    module.configure_model()
    before, objects = tower(module), {name: id(p) for name, p in module.named_parameters()}
    merge = merge_callback()
    make_trainer(merge).fit(module, small_data())
    assert objects == {name: id(p) for name, p in module.named_parameters()}
    merged = {layer.parameter for layer in merge.merger.layers}
    for name, tensor in tower(module).items():
        assert torch.equal(tensor, before[name]) != (name in merged), name
    assert all(parameter.requires_grad for parameter in module.backbone.vision_model.parameters())


def test_second_fit_folds_nothing(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    merge = merge_callback()
    make_trainer(merge).fit(module, small_data())
    before = tower(module)
    make_trainer(merge).fit(module, small_data())
    assert len(merge.tasks) == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in tower(module).items())


def test_second_fit_with_more_epochs_folds_only_what_is_left(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    merge = merge_callback()
    make_trainer(merge, max_epochs=1).fit(module, small_data())
    assert merge.tasks == TASKS[:1]
    make_trainer(merge, max_epochs=3).fit(module, small_data())
    assert merge.tasks == TASKS
    assert_same_weights(module, direct(TASKS))


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_other_stages_fold_nothing(
    verb: str, module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    module.configure_model()
    before = tower(module)
    merge = merge_callback()
    getattr(make_trainer(merge), verb)(module, small_data(), verbose=False)
    assert merge.tasks == []
    assert merge.merger is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in tower(module).items())
    assert set(module.last_scores) == {*TASKS, "clipart_category", "ACC", "Gen", "H"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_resume_from_every_epoch_is_bit_identical(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """Weights, matrix, reports and report rows equal those of the run that was not stopped."""
    saver = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    make_trainer(merge_callback(), saver, ReferenceRows(), StreamReport(), enable_checkpointing=True).fit(
        module, small_data()
    )
    straight, matrix = tower(module), module.matrix
    assert matrix is not None
    for epoch in (0, 1):
        fresh, merge, report = ContinualMergeModule(), merge_callback(), StreamReport()
        references = ReferenceRows()
        make_trainer(merge, references, report).fit(
            fresh, small_data(), ckpt_path=tmp_path / "ckpt" / f"epoch={epoch}.ckpt"
        )
        assert all(torch.equal(tensor, straight[name]) for name, tensor in tower(fresh).items())
        assert fresh.matrix is not None
        assert torch.equal(fresh.matrix.accuracy.nan_to_num(-1), matrix.accuracy.nan_to_num(-1))
        assert torch.equal(fresh.matrix.general, matrix.general)
        assert [step["task"] for step in report.steps] == TASKS == merge.tasks
        assert set(references.rows) == {"pretrained", "individual"}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_resume_inside_an_epoch(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """The epoch's start hook is skipped then, and the merge must neither be lost nor done twice."""
    saver = ModelCheckpoint(tmp_path / "ckpt", "{step}", save_top_k=-1, every_n_train_steps=1)
    make_trainer(merge_callback(), saver, enable_checkpointing=True).fit(module, small_data())
    for path in sorted((tmp_path / "ckpt").iterdir()):
        fresh, merge = ContinualMergeModule(), merge_callback()
        make_trainer(merge).fit(fresh, small_data(), ckpt_path=path)
        assert merge.tasks == TASKS
        assert_same_weights(fresh, direct(TASKS))


def test_mixed_precision_and_autocast_do_not_change_the_merge(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    """The arithmetic of a merge is float32, whatever the precision around it."""
    make_trainer(merge_callback(), precision="bf16-mixed").fit(module, small_data())
    assert_same_weights(module, direct(TASKS))


def test_a_failing_fold_leaves_the_last_state(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    """The second task fails, the first stays."""

    class Fails(SafeMerge):
        def fold_stack(self, stack: Stack) -> StackResult:
            if stack.index == 2 and stack.layers[0].endswith("up"):
                raise ArithmeticError("no luck")
            return super().fold_stack(stack)

    merge = MergeCallback(Fails(**RANKS))
    with pytest.raises(ValueError, match=r"task 'weather': layers vision\.0\.up to vision\.1\.up: no luck"):
        make_trainer(merge).fit(module, small_data())
    assert merge.tasks == TASKS[:1]
    assert_same_weights(module, direct(TASKS[:1]))


def test_plugs_into_another_module(make_trainer: Make, merge_callback: Make) -> None:
    """Somebody's module without our data module: the mapping of experts is the stream."""

    class Theirs(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.vision = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.ModuleDict()])})
            self.vision["blocks"][0]["mlp"] = torch.nn.ModuleDict({"fc1": torch.nn.Linear(6, 8)})
            self.head = torch.nn.Linear(8, 2)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return torch.zeros((), requires_grad=True)

        def configure_optimizers(self) -> None: ...

    theirs = Theirs()
    head, base = theirs.head.weight.clone(), theirs.vision["blocks"][0]["mlp"]["fc1"].weight.clone()
    name = "blocks.0.mlp.fc1.weight"
    experts = {task: {name: base + value} for task, value in (("a", 0.5), ("b", 0.25))}
    merge = merge_callback(module_attr="vision", keep_ratio=1.0, use_recovery=False)
    merge.experts = experts
    loader = torch.utils.data.DataLoader(torch.zeros(1, 1))
    make_trainer(merge, max_epochs=2).fit(theirs, loader)
    torch.testing.assert_close(theirs.vision["blocks"][0]["mlp"]["fc1"].weight, base + 0.75)
    assert torch.equal(theirs.head.weight, head)
    assert merge.state_key != SAFEMergeCallback().state_key  # both can be in one checkpoint
