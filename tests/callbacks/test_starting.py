"""The weights that a merge starts from are those that training starts from, wherever the module gets them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import tiny
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from loops import FAST, TASKS, Classifier, Tasks, Watch, batches, encoder, live
from torch import nn

from safemerge_pl.callbacks import MergedModelWriter, SAFEMergeCallback, StreamProgress
from safemerge_pl.callbacks.starting import StartingWeights
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import SafeMerge
from safemerge_pl.module import ContinualMergeModule

Make = Callable[..., Any]
pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
START = {name: 0.3 * tiny.randn(*t.shape, seed=7) for name, t in tiny.timm_vit().state_dict().items()}


def direct(*trained: tiny.Tensors) -> dict[str, torch.Tensor]:
    merger = ContinualMerger(START, SafeMerge(**FAST))
    for number, tensors in enumerate(trained):
        merger.fold(tensors, f"task{number}")
    return dict(merger.merged_parameters())


class InSetup(Classifier):
    def setup(self, stage: str) -> None:
        self.encoder.load_state_dict(START)


class OfItself(Classifier):
    """Reads one file for the whole module."""

    def setup(self, stage: str) -> None:
        self.load_state_dict({f"encoder.{name}": tensor for name, tensor in START.items()}, strict=False)


class MadeInSetup(Classifier):
    """The encoder does not exist before."""

    def __init__(self) -> None:
        super().__init__()
        del self.encoder

    def setup(self, stage: str) -> None:
        if not hasattr(self, "encoder"):
            self.encoder = tiny.timm_vit()
            self.encoder.load_state_dict(START)


class Configured(MadeInSetup):
    def setup(self, stage: str) -> None: ...

    def configure_model(self) -> None:
        MadeInSetup.setup(self, "fit")


class AtFitStart(Classifier):
    def on_fit_start(self) -> None:
        self.encoder.load_state_dict(START)


class AtTrainStart(Classifier):
    def on_train_start(self) -> None:
        self.encoder.load_state_dict(START)


class AtFirstEpoch(Classifier):
    def on_train_epoch_start(self) -> None:
        if not self.current_epoch:
            self.encoder.load_state_dict(START)


EARLY = [InSetup, OfItself, MadeInSetup, Configured]
LATE = [AtFitStart, AtTrainStart, AtFirstEpoch]


@pytest.mark.parametrize("kind", [*EARLY, *LATE], ids=lambda kind: kind.__name__)
def test_tasks_start_from_what_the_module_reads(kind: type[Classifier], make_trainer: Make) -> None:
    watch, module, merge = Watch(), kind(), live()
    make_trainer(watch, merge, max_epochs=4).fit(module, Tasks())
    tiny.assert_same(watch.before[0], START)
    tiny.assert_same(watch.before[2], START)
    tiny.assert_same(encoder(module), START | direct(watch.trained[1], watch.trained[3]))


class Another(L.Callback):
    """Reads the weights after the merge callback's own turn."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.encoder.load_state_dict(START)


def test_another_callback_reads_the_weights(make_trainer: Make) -> None:
    watch, module = Watch(), Classifier()
    make_trainer(watch, live(), Another(), max_epochs=4).fit(module, Tasks())
    tiny.assert_same(watch.before[2], START)


@pytest.mark.parametrize("kind", EARLY, ids=lambda kind: kind.__name__)
def test_a_resume_knows_what_the_module_read(kind: type[Classifier], make_trainer: Make, tmp_path: Path) -> None:
    """Inside a task and at a boundary; the checkpoint is loaded over those weights before any hook can see them."""
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    straight = kind()
    make_trainer(live(), saver, enable_checkpointing=True, max_epochs=4).fit(straight, Tasks())
    for epoch in (0, 1, 2):
        resumed, merge = kind(), live()
        make_trainer(merge, max_epochs=4).fit(resumed, Tasks(), ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        tiny.assert_same(encoder(resumed), encoder(straight))
        assert merge.tasks == ["task1", "task2"]


def test_a_resume_cannot_know_what_comes_after_it(make_trainer: Make, tmp_path: Path) -> None:
    """Weights that are read in ``on_fit_start`` would be read over those of the checkpoint."""
    trainer = make_trainer(live(), max_epochs=2)
    trainer.fit(AtFitStart(), Tasks())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(MisconfigurationException, match=r"cannot be resumed: .*another pretrained model.*`setup`"):
        make_trainer(live(), max_epochs=4).fit(AtFitStart(), Tasks(), ckpt_path=tmp_path / "x.ckpt")


def test_the_other_lightning_package_resumes_too(tmp_path: Path) -> None:
    """`import pytorch_lightning` has a Trainer and modules of its own."""
    pl = pytest.importorskip("pytorch_lightning")

    class Theirs(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = tiny.timm_vit(), nn.Linear(4, 3)

        def setup(self, stage: str) -> None:
            self.encoder.load_state_dict(START)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.encoder(batch[0])), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01)

    def fit(epochs: int, **kwargs: Any) -> tuple[Any, SAFEMergeCallback]:
        torch.manual_seed(0)
        merge = live(epochs_per_task=1)
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = pl.Trainer(
            max_epochs=epochs, callbacks=[merge], accelerator="cpu", logger=False, default_root_dir=tmp_path, **quiet
        )
        trainer.fit(Theirs(), batches(0), **kwargs)
        return trainer, merge

    straight = fit(2)[1]
    fit(1)[0].save_checkpoint(tmp_path / "x.ckpt")
    resumed = fit(2, ckpt_path=tmp_path / "x.ckpt")[1]
    assert resumed.merger is not None
    assert straight.merger is not None
    assert resumed.tasks == straight.tasks
    assert resumed.merger.fingerprint() == straight.merger.fingerprint()


@pytest.mark.parametrize("late", [False, True], ids=["setup", "on_fit_start"])
def test_adapters_that_arrive_with_the_fit(late: bool, make_trainer: Make) -> None:
    peft = pytest.importorskip("peft")

    class Adapted(Classifier):
        def adapt(self) -> None:
            with tiny.seeded():
                self.encoder: nn.Module = peft.get_peft_model(
                    self.encoder, peft.LoraConfig(target_modules=["qkv"], r=2)
                )

        def setup(self, stage: str) -> None:
            if not late:
                self.adapt()

        def on_fit_start(self) -> None:
            if late:
                self.adapt()
                self.trainer.strategy.setup_optimizers(self.trainer)

    watch, module, merge = Watch(), Adapted(), live()
    make_trainer(watch, merge, max_epochs=4).fit(module, Tasks())
    factor = "base_model.model.blocks.0.attn.qkv.lora_B.default.weight"
    assert watch.trained[1][factor].any()
    assert not watch.before[2][factor].any()
    assert merge.merger is not None
    assert "blocks.0.attn.qkv.weight" in merge.merger.merged_parameters()
    assert not any("lora" in name for name in merge.merger.pretrained)


@pytest.mark.parametrize("kind", [*EARLY, AtFitStart, AtTrainStart], ids=lambda kind: kind.__name__)
def test_models_from_files_are_compared_with_what_the_module_reads(kind: type[Classifier], make_trainer: Make) -> None:
    moved = [{name: t + 0.01 * tiny.randn(*t.shape, seed=seed) for name, t in START.items()} for seed in (1, 2)]
    experts = dict(zip("ab", moved, strict=True))
    merge = SAFEMergeCallback(**FAST, module_attr="encoder", experts=experts)  # type: ignore[arg-type]
    make_trainer(merge, max_epochs=2).fit(kind(), Tasks())
    assert merge.merger is not None
    right = direct(experts["a"], experts["b"])
    tiny.assert_same({name: merge.merger.merged[name] for name in right}, right)


@pytest.mark.parametrize("options", [{}, {"experts": {"a": START, "b": START}}], ids=["training", "files"])
def test_a_checkpoint_without_a_merge_is_no_pretrained_model(
    options: dict[str, Any], make_trainer: Make, tmp_path: Path
) -> None:
    """Its weights would be trained on, and the constructor's taken for the pretrained ones."""
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Classifier(), Tasks())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    merge = SAFEMergeCallback(**FAST, module_attr="encoder", **options) if options else live()
    with pytest.raises(MisconfigurationException, match=r"holds no state of this callback.*`pretrained=`"):
        make_trainer(merge, max_epochs=2).fit(Classifier(), Tasks(), ckpt_path=tmp_path / "x.ckpt")


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_checkpoint_is_scored_and_then_resumed(epoch: int, stage: str, make_trainer: Make, tmp_path: Path) -> None:
    """The same module twice: the second time it holds the checkpoint's weights already."""

    class Tested(Classifier):
        test_step = Classifier.validation_step

    class Data(Tasks):
        test_dataloader = Tasks.val_dataloader

    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    straight, path = Tested(), tmp_path / f"epoch={epoch}.ckpt"
    make_trainer(live(tasks=TASKS), saver, enable_checkpointing=True, max_epochs=4).fit(straight, Data())
    merge, module = live(tasks=TASKS), Tested()
    trainer = make_trainer(merge, max_epochs=4)
    for _ in range(2):
        getattr(trainer, stage)(module, Data(), ckpt_path=path, verbose=False)
        assert merge.merger is None
    trainer.fit(module, Data(), ckpt_path=path)
    tiny.assert_same(encoder(module), encoder(straight))
    assert merge.tasks == TASKS[:2]


def test_a_checkpoint_is_scored_and_then_trained_anew(make_trainer: Make, tmp_path: Path) -> None:
    """Without ``ckpt_path`` the module would start from merged weights."""
    trainer = make_trainer(live(), max_epochs=2)
    trainer.fit(Classifier(), Tasks())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    module, merge = Classifier(), live()
    trainer = make_trainer(merge, max_epochs=2)
    trainer.validate(module, Tasks(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    with pytest.raises(MisconfigurationException, match="not the pretrained ones any more: it holds a merge of task1"):
        trainer.fit(module, Tasks())


def test_a_stream_is_scored_and_then_resumed(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    trainer = make_trainer(merge_callback(), max_epochs=2)
    trainer.fit(module, small_data())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    merge, again = merge_callback(), ContinualMergeModule()
    trainer = make_trainer(merge)
    trainer.validate(again, small_data(), ckpt_path=tmp_path / "two.ckpt", verbose=False)
    trainer.fit(again, small_data(), ckpt_path=tmp_path / "two.ckpt")
    straight = merge_callback()
    make_trainer(straight).fit(ContinualMergeModule(), small_data())
    assert straight.merger is not None
    assert merge.merger is not None
    assert merge.merger.fingerprint() == straight.merger.fingerprint()


def test_callbacks_that_come_first_find_the_merger(make_trainer: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """The room on the disk is checked, whoever stands first in the list."""
    monkeypatch.setattr("safemerge_pl.output.folders.shutil.disk_usage", lambda path: type("Full", (), {"free": 1}))
    writer = MergedModelWriter(folder=str(tmp_path / "out"))
    with pytest.raises(MisconfigurationException, match="MB free"):
        make_trainer(StreamProgress(), writer, live(), max_epochs=2, enable_progress_bar=True).fit(InSetup(), Tasks())


def test_nothing_is_kept_without_a_checkpoint(make_trainer: Make) -> None:
    """No copy of the weights stays, and no hook in the module."""
    module, merge = OfItself(), live()
    make_trainer(merge, max_epochs=2).fit(module, Tasks())
    make_trainer(merge).validate(module, Tasks(), verbose=False)
    assert not module._load_state_dict_pre_hooks
    assert not merge._starting._kept
    other = live()
    make_trainer(other).validate(module, Tasks(), verbose=False)
    assert not module._load_state_dict_pre_hooks
    assert not other._starting._kept


def test_what_is_kept_belongs_to_one_module() -> None:
    first, second = Classifier(), Classifier()
    starting = StartingWeights(live().part)
    starting.watch(first)
    before = encoder(first)
    first.load_state_dict({f"encoder.{name}": tensor for name, tensor in START.items()}, strict=False)
    starting.loaded(first)
    assert starting.known(first)
    assert not starting.known(second)
    with starting.in_place(second):
        tiny.assert_same(encoder(second), before)
    with starting.in_place(first):
        tiny.assert_same(encoder(first), before)
    tiny.assert_same(encoder(first), START)


class Tunable(Tasks):
    """Its batches can be made larger."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return batches(TASKS.index(self.task), size=self.batch_size)


@pytest.mark.filterwarnings("ignore")  # Lightning remarks on its own search
@pytest.mark.parametrize(
    "tuner",
    [lambda: LearningRateFinder(min_lr=1e-4, num_training_steps=3), lambda: BatchSizeFinder(max_trials=2)],
    ids=["rate", "size"],
)
def test_a_search_before_training_leaves_no_trace(tuner: Any, make_trainer: Make) -> None:
    """It trains, and loads a checkpoint of its own."""
    watch, module, merge = Watch(), InSetup(), live()
    make_trainer(watch, tuner(), merge, max_epochs=4).fit(module, Tunable())
    assert merge.merger is not None
    tiny.assert_same(dict(merge.merger.pretrained), START)
    tiny.assert_same(watch.before[2], START)
    assert len(merge.tasks) == 2
