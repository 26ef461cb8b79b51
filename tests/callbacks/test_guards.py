"""Bad use of the callback in a training loop: one clear sentence each, before anything is trained where possible."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import tiny
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from loops import EPOCHS, TASKS, Classifier, Tasks, batches, encoder, live

from safemerge_pl.callbacks import SAFEMergeCallback
from safemerge_pl.data import ZooData
from safemerge_pl.module import ContinualMergeModule

Make = Callable[..., Any]


pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


class EMA(L.Callback):
    """Somebody's moving average."""


class Sampled(Tasks):
    """Validates on one loader only."""

    def val_dataloader(self) -> Any:
        return batches(0)


@pytest.mark.parametrize(
    ("options", "trainer", "message"),
    [
        ({"module_attr": "backbone"}, {}, "`module_attr` 'backbone' does not exist in Classifier"),
        ({"module_attr": "lr"}, {}, "`module_attr` 'lr' is a float, not a module"),
        (
            {"module_attr": "head"},
            {},
            "cannot be merged: none of the 2 parameters is an attention or feed-forward matrix",
        ),
        ({}, {"max_epochs": 1}, "run would end before its first task of 2 epochs"),
        ({}, {"max_epochs": 5}, "no multiple of 2 epochs a task: the last 1 .* set it to 4 or 6"),
        ({"tasks": ["a", "b"]}, {}, "which is 3 tasks of 2 epochs, but 2 are named .* set it to 4"),
        ({}, {"limit_train_batches": 0}, "nothing would be trained"),
        ({"boundary": "job"}, {}, "`boundary` 'job' must be 'fit' or an attribute .* Tasks has none"),
        ({"metric": "val_acc"}, {"check_val_every_n_epoch": 3}, "`check_val_every_n_epoch` is 3"),
        ({"metric": "val_acc"}, {"limit_val_batches": 0}, "`limit_val_batches` is 0: .*use `score`"),
        ({"metric": "val_acc"}, {"limit_val_batches": 0.0}, "`limit_val_batches` is 0: .*use `score`"),
        ({}, {"precision": "bf16-true"}, "half precision"),
        ({"output": "."}, {}, "the output . is or holds the current folder"),
    ],
)
def test_plans_that_cannot_work(
    options: dict[str, Any], trainer: dict[str, Any], message: str, make_trainer: Make
) -> None:
    """Refused before the first step."""
    module = Classifier()
    before = encoder(module)
    with pytest.raises(ValueError if "output" in options else MisconfigurationException, match=message):
        make_trainer(live(**options), **{"max_epochs": EPOCHS * 3, **trainer}).fit(module, Tasks())
    tiny.assert_same(encoder(module), before)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (WeightAveraging(), "WeightAveraging keeps an average"),
        (StochasticWeightAveraging(1e-3), "StochasticWeightAveraging keeps an average"),
        (EMA(), "EMA keeps an average"),
        (ModelPruning("l1_unstructured", amount=0.5), "ModelPruning computes weights from others and a mask"),
        (BackboneFinetuning(1), "BackboneFinetuning counts the epochs of the whole run.*`boundary='fit'`"),
        (EarlyStopping("val_acc"), "EarlyStopping ends the whole run, .* `boundary='fit'`"),
        (live(module_attr=None, rest="keep"), "two merge callbacks share 6 parameters"),
    ],
)
def test_callbacks_that_do_not_go_together(callback: L.Callback, message: str, make_trainer: Make) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        make_trainer(live(), callback, max_epochs=6).fit(Classifier(), Tasks())


@pytest.mark.parametrize("callback", [WeightAveraging(), ModelPruning("l1_unstructured")])
def test_those_that_write_weights_are_refused_with_checkpoints_too(callback: L.Callback, make_trainer: Make) -> None:
    with pytest.raises(MisconfigurationException, match=f"^{type(callback).__name__}"):
        make_trainer(SAFEMergeCallback(module_attr="encoder"), callback).fit(Classifier(), Tasks())


@pytest.mark.parametrize("name", ["EarlyStopping", "ModelPruning", "BackboneFinetuning", "StochasticWeightAveraging"])
def test_the_other_lightning_package_has_classes_of_its_own(name: str, make_trainer: Make) -> None:
    """`import pytorch_lightning`: other classes by the same names."""
    theirs = pytest.importorskip("pytorch_lightning.callbacks")
    assert not issubclass(getattr(theirs, name), L.Callback)
    trainer = make_trainer(live(), max_epochs=6)
    trainer.callbacks.append(getattr(theirs, name).__new__(getattr(theirs, name)))
    with pytest.raises(MisconfigurationException, match=f"^{name} "):
        trainer.callbacks[0].setup(trainer, Classifier(), "fit")


def test_a_module_that_trains_nothing(make_trainer: Make) -> None:
    with pytest.raises(MisconfigurationException, match="ContinualMergeModule trains nothing"):
        make_trainer(SAFEMergeCallback(epochs_per_task=1)).fit(ContinualMergeModule(), ZooData(["mnist"], []))


def test_a_head_inside_what_is_merged_is_named(make_trainer: Make) -> None:
    with pytest.warns(UserWarning, match=r"`head` holds nothing that is merged, and its training is undone"):
        make_trainer(live(module_attr=None), max_epochs=2).fit(Classifier(), Tasks())


def test_a_task_that_changed_nothing_is_said(make_trainer: Make) -> None:
    module = Classifier()
    module.encoder.requires_grad_(False)
    with pytest.warns(UserWarning, match="task 'task1': its merged layers equal the pretrained model's"):
        make_trainer(live(), max_epochs=2).fit(module, Tasks())


def test_no_boundary_is_ever_reached(make_trainer: Make) -> None:
    merge = live(boundary=lambda trainer: False)
    with pytest.raises(MisconfigurationException, match="no task was merged: the run ended after 2 epochs"):
        make_trainer(merge, max_epochs=2).fit(Classifier(), Tasks())


def test_a_run_that_ends_inside_a_task_says_so(make_trainer: Make) -> None:
    """``max_steps`` stops it in the second task; the merge of the first one is at hand."""
    module, merge = Classifier(), live()
    with pytest.warns(UserWarning, match=r"ended inside a task, 1 epochs after 'task1' was merged: .*apply_merged"):
        make_trainer(merge, max_epochs=6, max_steps=6).fit(module, Tasks())
    assert merge.merger is not None
    merge.merger.apply_merged()  # type: ignore[attr-defined]
    held = encoder(module)
    assert all(torch.equal(held[name], tensor) for name, tensor in merge.merger.merged_parameters().items())


def test_training_that_goes_on_after_the_last_task(make_trainer: Make) -> None:
    merge = live(tasks=["a"], boundary=lambda trainer: True)
    with pytest.raises(MisconfigurationException, match=r"all 1 tasks \(a\) are merged, but the training goes on"):
        make_trainer(merge, max_epochs=2).fit(Classifier(), Tasks())
    with pytest.raises(MisconfigurationException, match="all named tasks are merged"):
        make_trainer(merge, max_epochs=2).fit(Classifier(), Tasks())


def test_a_task_that_comes_back(make_trainer: Make) -> None:
    """Refused when its second training begins, not after it."""

    class Back(Tasks):
        @property
        def task(self) -> str:
            assert self.trainer is not None
            return "aba"[self.trainer.current_epoch // EPOCHS]

    with pytest.raises(MisconfigurationException, match="task 'a' is merged already"):
        make_trainer(merge := live(boundary="task"), max_epochs=6).fit(Classifier(), Back())
    assert merge.tasks == ["a", "b"]


def test_a_trainer_that_has_run_its_epochs(make_trainer: Make) -> None:
    """A second fit would silently do nothing."""
    merge, module = live(boundary="fit"), Classifier()
    trainer = make_trainer(merge, max_epochs=1)
    trainer.fit(module, batches(0))
    with pytest.raises(MisconfigurationException, match="has run its 1 epochs, so `fit` would do nothing"):
        trainer.fit(module, batches(1))


def test_weights_that_are_not_the_pretrained_ones(make_trainer: Make, tmp_path: Any) -> None:
    """A second callback on a module that was merged into; a Trainer that trained it before; and the way out."""
    module = Classifier()
    base = tiny.folder_of(tmp_path / "base", encoder(module))
    theta0 = encoder(module)
    make_trainer(live(), max_epochs=2).fit(module, Tasks())
    message = r"not the pretrained ones any more: it holds a merge of task1\. .*`pretrained=`"
    with pytest.raises(MisconfigurationException, match=message):
        make_trainer(live(), max_epochs=2).fit(module, Tasks())
    merge = live(pretrained=str(base))
    make_trainer(merge, max_epochs=2).fit(module, Tasks())
    assert merge.merger is not None
    tiny.assert_same(dict(merge.merger.pretrained), theta0)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module := Classifier(), batches(0))
    trainer.callbacks.append(live())
    trainer.fit_loop.max_epochs = 3
    with pytest.raises(MisconfigurationException, match="this Trainer has trained it for 2 steps"):
        trainer.fit(module, batches(0))


def test_early_stopping_that_remembers_the_task_before(make_trainer: Make) -> None:
    merge, module, stop = live(boundary="fit"), Classifier(), EarlyStopping("val_acc", mode="max")
    make_trainer(merge, stop, max_epochs=1).fit(module, batches(0), batches(0))
    with pytest.raises(MisconfigurationException, match="still remembers the best score"):
        make_trainer(merge, stop, max_epochs=1).fit(module, batches(0), batches(0))


def test_metrics_that_are_not_there(make_trainer: Make) -> None:
    merge = live(metric="val_accuracy", tasks=TASKS)
    with pytest.raises(MisconfigurationException, match="'val_accuracy' was not logged for 'a'; did you mean val_acc"):
        make_trainer(merge, max_epochs=6).fit(Classifier(), Tasks())
    merge = live(metric="val_acc", tasks=TASKS, controls=["x"])
    with pytest.raises(MisconfigurationException, match="there are 1 loaders for 3 tasks and 1 control sets"):
        make_trainer(merge, max_epochs=6).fit(Classifier(), Sampled())
    merge = live(score=lambda trainer, module: {"a": 75.0}, tasks=TASKS)
    with pytest.raises(MisconfigurationException, match=r"accuracy of 'a' must be in \[0, 1\].*, got 75\.0"):
        make_trainer(merge, max_epochs=6).fit(Classifier(), Tasks())
    merge = live(score=lambda trainer, module: {"b": 0.5}, tasks=TASKS)
    with pytest.raises(MisconfigurationException, match="`score` returned nothing for 'a'"):
        make_trainer(merge, max_epochs=6).fit(Classifier(), Tasks())
    merge = live(metric="val_acc")
    with pytest.raises(MisconfigurationException, match=r"this run has no validation .*use `score`"):
        make_trainer(merge, max_epochs=6).fit(module := Classifier(), batches(0))
    assert not module.trainer.global_step


def test_another_architecture_in_the_next_fit(make_trainer: Make) -> None:
    merge = live(boundary="fit")
    make_trainer(merge, max_epochs=1).fit(Classifier(), batches(0))

    def wider() -> torch.nn.Module:
        import timm

        model: torch.nn.Module = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=3, num_classes=4
        )
        return model

    with pytest.raises(MisconfigurationException, match=r"is not the one that the merge began with: `blocks\.0\.attn"):
        make_trainer(merge, max_epochs=1).fit(Classifier(wider), batches(1))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resume_with_other_options(make_trainer: Make, tmp_path: Any) -> None:
    trainer = make_trainer(live(), max_epochs=2)
    trainer.fit(Classifier(), Tasks())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    for options, message in (
        ({"rest": "keep"}, "made with rest='pretrained', not 'keep'"),
        ({"keep_ratio": 0.25}, "other settings .keep_ratio: 0.5 then, 0.25 now"),
    ):
        with pytest.raises(MisconfigurationException, match=message):
            make_trainer(live(**options), max_epochs=6).fit(Classifier(), Tasks(), ckpt_path=tmp_path / "x.ckpt")

    def moved() -> torch.nn.Module:
        model = tiny.timm_vit()
        with torch.no_grad():
            model.pos_embed.add_(1)  # type: ignore[union-attr,operator]
        return model

    with pytest.raises(MisconfigurationException, match="tensors that are not merged started from other values"):
        make_trainer(live(), max_epochs=6).fit(Classifier(moved), Tasks(), ckpt_path=tmp_path / "x.ckpt")
    merge = SAFEMergeCallback(experts={"a": encoder(Classifier())}, module_attr="encoder")  # type: ignore[dict-item]
    with pytest.raises(MisconfigurationException, match="from a merge of what a loop trains"):
        make_trainer(merge, max_epochs=1).fit(Classifier(), Tasks(), ckpt_path=tmp_path / "x.ckpt")


@pytest.mark.parametrize("merge", [live(), SAFEMergeCallback()], ids=["training", "checkpoints"])
@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_sharding_strategies_are_refused(name: str, merge: SAFEMergeCallback, make_trainer: Make) -> None:
    trainer = make_trainer()
    trainer.strategy.__class__ = type(name, (type(trainer.strategy),), {})
    with pytest.raises(MisconfigurationException, match=f"{name} splits each weight"):
        merge.setup(trainer, Classifier(), "fit")
