"""The callback in training loops that know nothing of merging: what is in the module when, and what comes out."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import tiny
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, EarlyStopping, ModelCheckpoint
from loops import EPOCHS, FAST, TASKS, Classifier, Tasks, Watch, batches, encoder, live
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, IterableDataset

from safemerge_pl.callbacks import SAFEMergeCallback
from safemerge_pl.live import LiveMerger
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import SafeMerge

Make = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


def direct(pretrained: tiny.Tensors, *trained: tiny.Tensors) -> dict[str, torch.Tensor]:
    """The merge of what was trained, without Lightning: only the merged parameters."""
    merger = ContinualMerger(pretrained, SafeMerge(**FAST))
    for number, tensors in enumerate(trained):
        merger.fold(tensors, f"task{number}")
    return dict(merger.merged_parameters())


def assert_holds(found: tiny.Tensors, merged: dict[str, torch.Tensor], rest: tiny.Tensors) -> None:
    """The merged parameters, and everything else from ``rest``."""
    tiny.assert_same(found, rest | merged)


def run(make_trainer: Make, merge: SAFEMergeCallback, *others: L.Callback, **kwargs: Any) -> Classifier:
    module, data = kwargs.pop("module", None) or Classifier(), kwargs.pop("data", None) or Tasks()
    ckpt = kwargs.pop("ckpt_path", None)
    make_trainer(*others, merge, **{"max_epochs": EPOCHS * len(TASKS), **kwargs}).fit(module, data, ckpt_path=ckpt)
    return module


def test_merged_at_boundaries_trained_inside_and_pretrained_again(make_trainer: Make) -> None:
    """Every weight at every moment of three tasks of two epochs."""
    watch, merge, module = Watch(), live(tasks=TASKS), Classifier()
    theta0, objects, head = encoder(module), [id(p) for p in module.parameters()], module.head.weight.detach().clone()
    run(make_trainer, merge, watch, module=module)
    trained = [watch.trained[epoch] for epoch in (1, 3, 5)]
    for task in range(3):
        tiny.assert_same(watch.before[2 * task], theta0)
        tiny.assert_same(watch.scored[2 * task], watch.trained[2 * task])
        assert not torch.equal(trained[task]["pos_embed"], theta0["pos_embed"])
        assert_holds(watch.scored[2 * task + 1], direct(theta0, *trained[: task + 1]), theta0)
    tiny.assert_same(encoder(module), watch.scored[5])
    assert merge.tasks == TASKS
    assert module.made == [0, 4, 8]  # a fresh optimiser a task,
    assert watch.states == dict(enumerate([0, 34, 0, 34, 0, 34]))  # with no memory of the one before
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 / 4)  # two steps of its schedule
    assert objects == [id(p) for p in module.parameters()]
    assert not torch.equal(module.head.weight, head)
    assert [row.source for row in merge.reports] == [f"trained until step {step}" for step in (4, 8, 12)]


def test_what_is_not_merged_can_be_kept(make_trainer: Make) -> None:
    watch, module = Watch(), Classifier()
    theta0 = encoder(module)
    run(make_trainer, live(rest="keep"), watch, module=module, max_epochs=4)
    assert_holds(watch.scored[1], direct(theta0, watch.trained[1]), watch.trained[1])
    base = {name: theta0[name] for name in direct(theta0)}
    assert_holds(watch.before[2], base, watch.trained[1])
    assert_holds(watch.scored[3], direct(theta0, watch.trained[1], watch.trained[3]), watch.trained[3])


def test_tasks_can_start_from_the_merge(make_trainer: Make) -> None:
    """The task vector is then what the task's own training changed, or the earlier tasks would count twice."""
    watch, module = Watch(), Classifier()
    theta0 = encoder(module)
    run(make_trainer, live(restart_from="merged"), watch, module=module, max_epochs=4)
    first = watch.scored[1]
    tiny.assert_same(watch.before[2], first)
    moved = {name: theta0[name] + (watch.trained[3][name] - first[name]) for name in direct(theta0)}
    assert_holds(watch.scored[3], direct(theta0, watch.trained[1], moved), theta0)


class Endless(IterableDataset[Any]):
    """Three batches' worth of samples, without a length."""

    def __iter__(self) -> Any:
        return iter(batches(0, count=6).dataset)


@pytest.mark.parametrize("data", [batches(0, count=6, size=2), DataLoader(Endless(), 2)], ids=["sized", "endless"])
def test_the_last_accumulated_step_is_folded(data: Any, make_trainer: Make) -> None:
    """Three batches, two a step: the last step comes from one batch, and is in the merge."""
    watch, module = Watch(), Classifier()
    theta0 = encoder(module)
    merge = live(epochs_per_task=1)
    trainer = make_trainer(watch, merge, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, data)
    assert trainer.global_step == 2
    assert merge.reports[0].source == "trained until step 2"
    assert_holds(encoder(module), direct(theta0, watch.trained[0]), theta0)


def test_every_kind_of_boundary_gives_the_same_merge(make_trainer: Make) -> None:
    """By epochs, by a function, by the data module's task, one fit per task (new Trainer, same Trainer)."""
    expected = encoder(run(make_trainer, live()))
    asked: list[int] = []

    def ends(trainer: L.Trainer) -> bool:
        asked.append(trainer.current_epoch)
        return trainer.current_epoch % EPOCHS == EPOCHS - 1

    tiny.assert_same(encoder(run(make_trainer, live(boundary=ends))), expected)
    assert asked == list(range(6))
    by_name = live(boundary="task")
    tiny.assert_same(encoder(run(make_trainer, by_name)), expected)
    assert by_name.tasks == TASKS
    merge, module = live(boundary="fit"), Classifier()
    for number in range(3):
        make_trainer(merge, max_epochs=EPOCHS).fit(module, batches(number))
    tiny.assert_same(encoder(module), expected)
    assert merge.tasks == ["task1", "task2", "task3"]
    merge, module, data = live(boundary="fit", tasks=TASKS), Classifier(), Tasks()
    trainer = make_trainer(merge, max_epochs=EPOCHS)
    for _ in TASKS:
        trainer.fit(module, data)
        trainer.fit_loop.max_epochs += EPOCHS
    tiny.assert_same(encoder(module), expected)
    assert merge.tasks == TASKS


def test_a_new_module_for_each_fit(make_trainer: Make) -> None:
    merge = live(boundary="fit")
    watches = [Watch(), Watch()]
    modules = [Classifier(), Classifier()]
    with torch.no_grad():
        modules[1].encoder.blocks[0].attn.qkv.weight.add_(1)  # type: ignore[union-attr,index]  # the callback knows better
    theta0 = encoder(modules[0])
    for number, (watch, module) in enumerate(zip(watches, modules, strict=True)):
        make_trainer(watch, merge, max_epochs=1).fit(module, batches(number))
    tiny.assert_same(watches[1].before[0], theta0)
    assert_holds(encoder(modules[1]), direct(theta0, watches[0].trained[0], watches[1].trained[0]), theta0)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_resume_anywhere_is_bit_identical(make_trainer: Make, tmp_path: Path) -> None:
    """After every step, inside an epoch, inside a task and at a boundary."""
    saver = ModelCheckpoint(tmp_path, "s{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False)
    ends = ModelCheckpoint(tmp_path, "e{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    merge = live(tasks=TASKS, metric="val_acc")
    module = run(make_trainer, merge, saver, ends, enable_checkpointing=True)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 18
    for file in files:
        torch.load(file, weights_only=True)
        again = live(tasks=TASKS, metric="val_acc")
        if file.name == "sstep=12.ckpt" or file.name == "eepoch=5.ckpt":
            continue  # the end
        unscored = file.name in ("sstep=4.ckpt", "sstep=8.ckpt")  # after the fold, before its validation
        with pytest.warns(UserWarning, match="its row of") if unscored else nullcontext():
            resumed = run(make_trainer, again, ckpt_path=file)
        tiny.assert_same(tiny.copied(resumed.state_dict()), tiny.copied(module.state_dict()))
        assert [row.merged for row in again.reports] == [row.merged for row in merge.reports], file.name
        assert again.live is not None
        assert merge.live is not None
        assert again.live.scores.rows[2:] == merge.live.scores.rows[2:]
        assert unscored or again.live.scores.rows == merge.live.scores.rows, file.name


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_resume_with_the_other_boundaries(epoch: int, make_trainer: Make, tmp_path: Path) -> None:
    """Where the data module tells the task, the fold is still to come when the checkpoint is taken."""
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    straight, merge = Classifier(), live(boundary="task")
    run(make_trainer, merge, saver, enable_checkpointing=True, module=straight)
    again = live(boundary="task")
    resumed = run(make_trainer, again, ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
    tiny.assert_same(tiny.copied(resumed.state_dict()), tiny.copied(straight.state_dict()))
    assert again.tasks == merge.tasks == TASKS


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_resume_inside_the_second_of_several_fits(make_trainer: Make, tmp_path: Path) -> None:
    """A new process takes up the second task where it was, with the first one merged."""
    straight, merge = Classifier(), live(boundary="fit")
    make_trainer(merge, max_epochs=2).fit(straight, batches(0))
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    make_trainer(merge, saver, enable_checkpointing=True, max_epochs=2).fit(straight, batches(1))
    resumed, again = Classifier(), live(boundary="fit")
    make_trainer(again, max_epochs=2).fit(resumed, batches(1), ckpt_path=tmp_path / "epoch=0.ckpt")
    tiny.assert_same(tiny.copied(resumed.state_dict()), tiny.copied(straight.state_dict()))
    assert again.tasks == ["task1", "task2"]


def test_what_checkpoints_hold(make_trainer: Make, tmp_path: Path) -> None:
    """The weights in training inside a task, the merged ones at a boundary; the merge is in the callback's state."""
    watch, saver = Watch(), ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    run(make_trainer, live(), watch, saver, enable_checkpointing=True, max_epochs=4)
    for epoch in range(4):
        content = torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True)
        held = tiny.renamed(
            {n: t for n, t in content["state_dict"].items() if n.startswith("encoder.")}, "encoder.", ""
        )
        tiny.assert_same(held, watch.scored[epoch])
    state = next(value for key, value in content["callbacks"].items() if key.startswith("SAFEMergeCallback"))
    assert all(torch.equal(tensor, watch.scored[3][name]) for name, tensor in state["live"]["merged"].items())


def test_mixed_precision_does_not_change_the_merge(make_trainer: Make) -> None:
    """Weights stay float32 under mixed precision, and the merge runs outside of autocast."""
    watch, module = Watch(), Classifier()
    theta0 = encoder(module)
    run(make_trainer, live(), watch, module=module, precision="bf16-mixed", max_epochs=2)
    assert_holds(encoder(module), direct(theta0, watch.trained[1]), theta0)


def test_frozen_parts_stay(make_trainer: Make) -> None:
    module = Classifier()
    module.encoder.blocks[0].requires_grad_(False)  # type: ignore[index,operator,union-attr]
    theta0 = encoder(module)
    merge = live()
    run(make_trainer, merge, module=module)
    for name, tensor in encoder(module).items():
        trained = name in direct(theta0) and not name.startswith("blocks.0.")
        assert torch.equal(tensor, theta0[name]) != trained, name
    assert not any(p.requires_grad for p in module.encoder.blocks[0].parameters())  # type: ignore[index,operator,union-attr]


def test_adapters_are_trained_folded_and_start_anew(make_trainer: Make) -> None:
    """The frozen weights hold the merge at a boundary, and adapters are zero again."""
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        with tiny.seeded():
            wrapped: nn.Module = peft.get_peft_model(tiny.timm_vit(), peft.LoraConfig(target_modules=["qkv"], r=2))
        return wrapped

    watch, merge, module = Watch(), live(tasks=TASKS), Classifier(adapted)
    theta0 = encoder(module)
    run(make_trainer, merge, watch, module=module)
    assert merge.merger is not None
    merged = merge.merger.merged_parameters()
    for name, tensor in encoder(module).items():
        plain = name.replace("base_model.model.", "").replace("base_layer.", "")
        assert torch.equal(tensor, merged.get(plain, theta0[name])), name
    factor = "base_model.model.blocks.0.attn.qkv.lora_B.default.weight"
    assert watch.trained[1][factor].any()
    assert not watch.scored[1][factor].any()
    assert not torch.equal(merged["blocks.0.attn.qkv.weight"], tiny.timm_vit().state_dict()["blocks.0.attn.qkv.weight"])
    tiny.assert_same(watch.before[2], theta0)


def test_early_stopping_ends_a_fit_and_so_a_task(make_trainer: Make) -> None:
    """Stopped after two of nine epochs; a new Trainer goes on with the next task."""
    merge, module = live(boundary="fit"), Classifier()
    for number in range(2):
        stop = EarlyStopping("val_acc", patience=1, mode="max", min_delta=2.0)
        trainer = make_trainer(merge, stop, max_epochs=9)
        trainer.fit(module, batches(number), batches(number))
        assert trainer.current_epoch == 2
    assert [row.source for row in merge.reports] == ["trained until step 4"] * 2


def test_a_skipped_rest_of_the_epoch_still_ends_it(make_trainer: Make) -> None:
    """A module may end its epochs itself; Lightning then skips the batch's last hook."""

    class Skips(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx else None

    merge = live()
    run(make_trainer, merge, module=Skips())
    assert len(merge.tasks) == 3


def test_smoke_run_merges_once_and_writes_nothing(make_trainer: Make, tmp_path: Path) -> None:
    merge = live(output=str(tmp_path / "out"), metric="val_acc", tasks=TASKS)
    run(make_trainer, merge, fast_dev_run=True)
    assert merge.tasks == ["a"]
    assert not (tmp_path / "out").exists()


def test_the_data_order_of_the_loop_is_its_own(make_trainer: Make) -> None:
    """Dropout and shuffling draw the same numbers with the callback and without it."""

    class Draws(Classifier):
        drawn: list[float]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.drawn.append(torch.rand(()).item())
            return super().training_step(batch, batch_idx)

    drawn = []
    for callbacks in ((), (live(),)):
        module = Draws()
        module.drawn = []
        torch.manual_seed(3)
        make_trainer(*callbacks, max_epochs=4).fit(module, Tasks())
        drawn.append(module.drawn)
    assert drawn[0] == drawn[1]


def test_output_is_a_merge_that_can_be_continued(make_trainer: Make, tmp_path: Path) -> None:
    merge, module = live(output=str(tmp_path / "out")), Classifier()
    pretrained = tiny.timm_vit()
    run(make_trainer, merge, module=module)
    again = LiveMerger.load(tmp_path / "out", pretrained)
    assert again.tasks == ["task1", "task2", "task3"]
    again.apply_merged()
    tiny.assert_same(tiny.copied(pretrained.state_dict()), encoder(module))
    again.restart()
    tiny.assert_same(tiny.copied(pretrained.state_dict()), tiny.copied(tiny.timm_vit().state_dict()))


def test_two_parts_of_one_module(make_trainer: Make) -> None:
    """Two callbacks merge two towers; each is as if it were alone."""

    class Two(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.other = tiny.timm_vit()

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.encoder(pixels) + self.other(pixels))
            return out

    both = (live(), live(module_attr="other"))
    module = Two()
    make_trainer(*both, max_epochs=4).fit(module, Tasks())
    assert [len(merge.tasks) for merge in both] == [2, 2]
    for merge, part in zip(both, (module.encoder, module.other), strict=True):
        assert merge.merger is not None
        held = part.state_dict()
        assert all(torch.equal(held[name], tensor) for name, tensor in merge.merger.merged_parameters().items())


def test_batch_norm_is_put_back_and_said(make_trainer: Make) -> None:
    def convolutional() -> nn.Module:
        with tiny.seeded():
            return nn.Sequential(
                nn.Conv2d(3, 4, 8, 8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4)
            )

    watch, module = Watch(), Classifier(convolutional)
    theta0 = encoder(module)
    merge = live(layers=["3.weight"])
    with pytest.warns(
        UserWarning, match=r"1 BatchNorm layers \(first `1`\).*put back to the pretrained ones.*update_bn"
    ):
        run(make_trainer, merge, watch, module=module)
    assert not torch.equal(watch.trained[1]["1.running_mean"], theta0["1.running_mean"])
    assert int(watch.trained[1]["1.num_batches_tracked"]) > 0
    for name in ("1.running_mean", "1.num_batches_tracked"):
        assert torch.equal(watch.scored[1][name], theta0[name])
        assert torch.equal(watch.before[2][name], theta0[name])


def test_diverged_training_ends_in_one_sentence(make_trainer: Make) -> None:
    """NaN is found when the task is folded, and what was merged before stays."""

    class Diverges(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.current_epoch == 3:
                self.encoder.blocks[1].mlp.fc1.weight.grad.fill_(torch.nan)  # type: ignore[index,operator,union-attr]

    merge = live(tasks=TASKS)
    with pytest.raises(ValueError, match=r"task 'b': trained until step 8: `blocks\.\S+` has \d+ NaN"):
        run(make_trainer, merge, module=Diverges())
    assert merge.tasks == ["a"]


class Short(IterableDataset[Any]):
    """Says more samples than it gives."""

    def __init__(self, task: int, gives: int) -> None:
        self.data, self.gives = batches(task, count=8).dataset, gives

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return (self.data[i] for i in range(self.gives))


class EndsEarly(Classifier):
    """Raises what a loop takes for the end of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise StopIteration
        return super().training_step(batch, batch_idx)


class ShortTasks(Tasks):
    """Three batches of two in place of the four that the loaders say."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Short(TASKS.index(self.task), 6), 2)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("short", [True, False], ids=["loader", "module"])
def test_an_epoch_is_over_when_lightning_says_so(short: bool, accumulate: int, make_trainer: Make) -> None:
    """With fewer batches than the loader says; each task is what its own steps left."""
    watch, merge = Watch(), live()
    module, data = (Classifier(), ShortTasks()) if short else (EndsEarly(), Tasks(size=2))
    theta0 = encoder(module)
    make_trainer(watch, merge, max_epochs=6, accumulate_grad_batches=accumulate).fit(module, data)
    assert [row.source for row in merge.reports] == [f"trained until step {3 // accumulate * n}" for n in (2, 4, 6)]
    for epoch in (0, 2, 4):
        tiny.assert_same(watch.before[epoch], theta0)
    assert_holds(encoder(module), direct(theta0, *(watch.trained[epoch] for epoch in (1, 3, 5))), theta0)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_other_boundaries_of_loaders_that_end_early(make_trainer: Make) -> None:
    expected = encoder(run(make_trainer, live(), data=ShortTasks()))
    asked: list[int] = []

    def ends(trainer: L.Trainer) -> bool:
        asked.append(trainer.current_epoch)
        return trainer.current_epoch % EPOCHS == EPOCHS - 1

    tiny.assert_same(encoder(run(make_trainer, live(boundary=ends), data=ShortTasks())), expected)
    assert asked == list(range(6))
    tiny.assert_same(encoder(run(make_trainer, live(boundary="task"), data=ShortTasks())), expected)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_resume_where_loaders_end_early(make_trainer: Make, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    straight = run(make_trainer, live(), saver, enable_checkpointing=True, data=ShortTasks())
    for epoch in range(5):
        again = live()
        resumed = run(make_trainer, again, ckpt_path=tmp_path / f"epoch={epoch}.ckpt", data=ShortTasks())
        assert len(again.tasks) == 3
        tiny.assert_same(encoder(resumed), encoder(straight))


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_no_validation_comes_after_a_loader_that_ended_early(make_trainer: Make) -> None:
    with pytest.raises(
        MisconfigurationException, match="gave fewer batches than its length says, and Lightning then skips"
    ):
        run(make_trainer, live(metric="val_acc", tasks=TASKS), data=ShortTasks())


class Stops(L.Callback):
    """Stops the run after the first batch of the fourth epoch, as a signal or a time limit would."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 3:
            trainer.should_stop = True


@pytest.mark.parametrize("limit", ["max_steps", "should_stop"])
def test_an_epoch_that_is_cut_off_is_not_over(limit: str, make_trainer: Make) -> None:
    """One of two batches: the task would be merged half trained."""
    merge = live()
    others, kwargs = ((), {"max_steps": 7}) if limit == "max_steps" else ((Stops(),), {})
    with pytest.warns(UserWarning, match="ended inside a task, 1 epochs after 'task1' was merged"):
        run(make_trainer, merge, *others, **kwargs)
    assert merge.tasks == ["task1"]


@pytest.mark.parametrize("limit", [1, 3, 0.5])
def test_limited_epochs_end_at_their_limit(limit: float, make_trainer: Make) -> None:
    merge = live()
    run(make_trainer, merge, limit_train_batches=limit, data=Tasks(size=2))
    steps = 2 * (limit if isinstance(limit, int) else 2)
    assert [row.source for row in merge.reports] == [f"trained until step {steps * n}" for n in (1, 2, 3)]


class Freezes(BaseFinetuning):
    """Trains the encoder's second block from the second epoch on, and the first never."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.encoder.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.encoder.blocks[1], optimizer)


class Filters(Classifier):
    """Gives its optimiser what is trained, as those callbacks want it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.lr)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen")  # Lightning compares values: all biases are 0
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_what_is_frozen_stays_and_what_is_thawed_is_merged(epochs: int, first: bool, make_trainer: Make) -> None:
    """Whether it is thawed inside a task or where the second begins."""
    merge, watch, module = live(epochs_per_task=epochs), Watch(), Filters()
    theta0 = encoder(module)
    others = (watch, Freezes(), merge) if first else (watch, merge, Freezes())
    nothing = pytest.warns(UserWarning, match="'task1': its merged layers equal the pretrained model's")
    with nothing if epochs == 1 else nullcontext():
        make_trainer(*others, max_epochs=2 * epochs).fit(module, Tasks(epochs))
    trained = [watch.trained[epochs - 1], watch.trained[2 * epochs - 1]]
    assert_holds(encoder(module), direct(theta0, *trained), theta0)
    for name in direct(theta0):
        moved = [not torch.equal(tensors[name], theta0[name]) for tensors in trained]
        assert moved == ([epochs == 2, True] if name.startswith("blocks.1.") else [False, False]), name


def test_lightnings_own_finetuning_in_fits_of_one_task(make_trainer: Make) -> None:
    class Backed(Filters):
        @property
        def backbone(self) -> Any:
            return self.encoder

    merge, module = live(boundary="fit"), Backed()
    theta0 = encoder(module)
    watches = [Watch(), Watch()]
    for number, watch in enumerate(watches):
        make_trainer(watch, BackboneFinetuning(1), merge, max_epochs=2).fit(module, batches(number))
        assert all(torch.equal(watch.trained[0][name], theta0[name]) for name in direct(theta0))
    trained = [watch.trained[1] for watch in watches]
    assert not any(
        torch.equal(tensors["blocks.0.attn.qkv.weight"], theta0["blocks.0.attn.qkv.weight"]) for tensors in trained
    )
    assert_holds(encoder(module), direct(theta0, *trained), theta0)


def test_pruned_in_the_middle(make_trainer: Make) -> None:
    """By a callback that nobody can know; nothing is merged, and nothing changed."""

    class Prunes(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 2:
                prune.l1_unstructured(pl_module.encoder.blocks[0].mlp.fc1, "weight", 0.5)

    merge = live(tasks=TASKS)
    with pytest.raises(
        ValueError, match=r"`blocks\.0\.mlp\.fc1\.weight` is pruned .* since the merge began.*prune\.remove"
    ):
        run(make_trainer, merge, Prunes())
    assert merge.tasks == ["a"]
