"""The merge callback under a real Trainer: when it folds, what it leaves, how it resumes, what it refuses."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from event_files import scalars
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from safetensors.torch import load_file, save_file
from small import RANKS, TASKS, tower

import callbacks as alias
import safemerge_pl.callbacks as ours
from safemerge_pl.callbacks import MergeCallback, MergedModelWriter, ReferenceRows, SAFEMergeCallback, StreamReport
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import SafeMerge, Stack, StackResult
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.output.files import LEDGER_FILE
from safemerge_pl.zoo import FILES

Make = Callable[..., Any]


def direct(tasks: list[str], **settings: Any) -> ContinualMerger:
    """The same merge without Lightning."""
    merger = ContinualMerger(FILES / "model", SafeMerge(**{**RANKS, **settings}))
    for task in tasks:
        merger.fold(FILES / "experts" / task, task)
    return merger


def assert_same_weights(module: L.LightningModule, merger: ContinualMerger) -> None:
    mine = tower(module)
    for name, tensor in merger.merged_parameters().items():
        assert torch.equal(mine[name.removeprefix("vision_model.")], tensor), name


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
    """I17, F13: in-place writes; every parameter that is not merged is bit for bit the pretrained one."""
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
    """I2."""
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
    """I1."""
    module.configure_model()
    before = tower(module)
    merge = merge_callback()
    getattr(make_trainer(merge), verb)(module, small_data(), verbose=False)
    assert merge.tasks == []
    assert merge.merger is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in tower(module).items())
    assert set(module.last_scores) == {*TASKS, "clipart_category", "ACC", "Gen", "H"}


def test_sanity_check_enters_nothing(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    """Trap 15."""
    make_trainer(merge_callback(), num_sanity_val_steps=2, max_epochs=1).fit(module, small_data())
    assert module.matrix is not None
    assert module.matrix.steps == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_resume_from_every_epoch_is_bit_identical(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """I4, I16: weights, matrix, reports and report rows equal those of the run that was not stopped."""
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
    """Trap 3: the epoch's start hook is skipped then, and the merge must neither be lost nor done twice."""
    saver = ModelCheckpoint(tmp_path / "ckpt", "{step}", save_top_k=-1, every_n_train_steps=1)
    make_trainer(merge_callback(), saver, enable_checkpointing=True).fit(module, small_data())
    for path in sorted((tmp_path / "ckpt").iterdir()):
        fresh, merge = ContinualMergeModule(), merge_callback()
        make_trainer(merge).fit(fresh, small_data(), ckpt_path=path)
        assert merge.tasks == TASKS
        assert_same_weights(fresh, direct(TASKS))


def checkpoint_after_two(module: ContinualMergeModule, data: Any, trainer: L.Trainer, path: Path) -> Path:
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    return path


@pytest.mark.parametrize(
    ("data_args", "merge_args", "message"),
    [
        ({}, {"keep_ratio": 0.3}, "keep_ratio: 0.5 then, 0.3 now"),
        ({"tasks": ["weather", "font_category", "mnist"]}, {}, "same order"),
        ({"controls": ["fashion"]}, {}, "control sets"),
        ({}, {"layers": ["*.q_proj.weight"]}, "another pretrained model"),
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
    """O3, P3: never half a stream with one setting and half with another."""
    path = checkpoint_after_two(
        module, small_data(), make_trainer(merge_callback(), max_epochs=2), tmp_path / "two.ckpt"
    )
    with pytest.raises(MisconfigurationException, match=message):
        make_trainer(merge_callback(**merge_args)).fit(ContinualMergeModule(), small_data(**data_args), ckpt_path=path)


def test_resume_with_a_longer_stream_and_without_the_callback(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """I7; a stream may grow at its end."""
    path = checkpoint_after_two(
        module, small_data(TASKS[:2]), make_trainer(merge_callback(), max_epochs=2), tmp_path / "two.ckpt"
    )
    longer = ContinualMergeModule()
    make_trainer(merge_callback()).fit(longer, small_data(), ckpt_path=path)
    assert_same_weights(longer, direct(TASKS))
    assert longer.matrix is not None
    assert torch.equal(longer.matrix.accuracy.isnan(), torch.ones(3, 3).triu(1).bool())
    with (
        pytest.warns(UserWarning, match="Be aware that when using `ckpt_path`"),
        pytest.raises(MisconfigurationException, match="no MergeCallback to continue"),
    ):
        make_trainer().fit(ContinualMergeModule(), small_data(), ckpt_path=path)


def test_checkpoint_is_plain_small_and_rebuilds_the_module(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """I5, I9, I10, I11."""
    path = checkpoint_after_two(
        module, small_data(), make_trainer(merge_callback(), ReferenceRows(), StreamReport()), tmp_path / "x.ckpt"
    )
    torch.load(path, weights_only=True)
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    assert path.stat().st_size <= 1.2 * weights
    again = ContinualMergeModule.load_from_checkpoint(path)
    assert again.merged_tasks == TASKS
    assert all(torch.equal(tensor, tower(module)[name]) for name, tensor in tower(again).items())
    assert again.matrix is not None
    assert again.matrix.compute()["ACC"] == module.matrix.compute()["ACC"]  # type: ignore[union-attr]


def test_module_with_merged_weights_is_no_pretrained_model(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    make_trainer(merge_callback(), max_epochs=1).fit(module, small_data())
    with pytest.raises(MisconfigurationException, match="already holds a merge of font_category"):
        make_trainer(merge_callback()).fit(module, small_data())


def test_every_problem_is_listed_before_anything_changes(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """F1, D8, E1: NaN, a missing tensor and a wrong shape in three experts, in one message."""
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


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_sharding_strategies_are_refused(name: str, make_trainer: Make, merge_callback: Make) -> None:
    """J5."""
    trainer = make_trainer()
    trainer.strategy.__class__ = type(name, (type(trainer.strategy),), {})
    with pytest.raises(MisconfigurationException, match=f"{name} splits each weight"):
        merge_callback().setup(trainer, ContinualMergeModule(), "fit")


def test_mixed_precision_and_autocast_do_not_change_the_merge(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    """A5."""
    make_trainer(merge_callback(), precision="bf16-mixed").fit(module, small_data())
    assert_same_weights(module, direct(TASKS))


def test_a_failing_fold_leaves_the_last_state(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    """G6 under Lightning: the second task fails, the first stays."""

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
    assert merge.state_key != SAFEMergeCallback().state_key  # I6


@pytest.mark.parametrize("path", ["backbone.nothing", "backbone.merged_attr"])
def test_module_attr_must_name_a_module(path: str, small_data: Make, make_trainer: Make, merge_callback: Make) -> None:
    with pytest.raises(MisconfigurationException, match=f"`module_attr` '{path}'"):
        make_trainer(merge_callback(module_attr=path)).fit(ContinualMergeModule(), small_data())


def test_smoke_run_writes_nothing(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """I18."""
    writers = (StreamReport(folder=str(tmp_path / "report")), MergedModelWriter(folder=str(tmp_path / "merged")))
    make_trainer(merge_callback(), *writers, fast_dev_run=True).fit(module, small_data())
    assert not (tmp_path / "report").exists()
    assert not (tmp_path / "merged").exists()


def test_output_is_checked_before_the_stream_and_loads_afterwards(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    from transformers import AutoProcessor, CLIPModel, CLIPVisionModel

    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no earlier merge"):
        make_trainer(merge_callback(), MergedModelWriter(folder=str(tmp_path / "taken"))).fit(
            ContinualMergeModule(), small_data()
        )
    out = tmp_path / "merged"
    merge = merge_callback()
    writer = MergedModelWriter(folder=str(out), dtype="float32", max_shard_size="2MB")
    make_trainer(merge, writer).fit(module, small_data())
    assert (out / "model.safetensors.index.json").exists()
    assert len((out / LEDGER_FILE).read_text().splitlines()) == len(TASKS)
    for kind in (CLIPVisionModel, CLIPModel):
        model, info = kind.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"]
        vision = model if kind is CLIPVisionModel else model.vision_model
        found = vision.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in tower(module).items())
    assert AutoProcessor.from_pretrained(out) is not None
    again = ContinualMerger.load(out, FILES / "model")
    assert again.fingerprint() == direct(TASKS).fingerprint()


def test_a_disk_without_room_is_refused_before_the_stream(
    small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8."""
    monkeypatch.setattr("safemerge_pl.output.folders.shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    merge = merge_callback()
    trainer = make_trainer(merge, MergedModelWriter(folder=str(tmp_path / "merged")))
    with pytest.raises(MisconfigurationException, match=r"merged needs about [\d.]+ MB and .* has 0\.0 MB free"):
        trainer.fit(ContinualMergeModule(), small_data())
    assert merge.tasks == []
    assert not (tmp_path / "merged").exists()


def test_tensorboard_shows_the_stream(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """K9, O6: scalars over the number of merged tasks, no NaN, a heat map, recovery curves, hparams with H."""
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    merge = merge_callback()
    make_trainer(merge, ReferenceRows(individual=False), StreamReport(), logger=logger).fit(module, small_data())
    found = scalars(Path(logger.log_dir))
    assert [step for step, _ in found["stream/ACC"]] == [1, 2, 3]
    assert [step for step, _ in found["stream/BWT"]] == [2, 3]  # undefined for one task
    assert [step for step, _ in found["stream/H"]] == [step for step, _ in found["stream/Gen"]] == [1, 2, 3]
    assert [step for step, _ in found["task/mnist/acc"]] == [3]
    assert len(found["control/clipart_category/acc"]) == 3
    assert [round(value, 3) for _, value in found["merge/kept_fraction"]] == [0.5] * 3
    assert len(found["recovery/02_weather"]) == RANKS["num_steps"] + 1
    assert found["hp/H"][0][1] == pytest.approx(module.last_scores["H"])
    assert "stream/matrix" in found
    assert not any(value != value for points in found.values() for _, value in points)
    folder = Path(logger.log_dir)
    assert {"report.json", "report.md", "matrix.png", "stream.png"} <= {path.name for path in folder.iterdir()}
    text = (folder / "report.md").read_text()
    assert "| **ACC** |" in text
    assert "NaN" not in (folder / "report.json").read_text()


def test_other_loggers(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    """O5: two loggers at once, none of them TensorBoard."""
    loggers = [CSVLogger(tmp_path, "a"), CSVLogger(tmp_path, "b")]
    make_trainer(merge_callback(), StreamReport(), logger=loggers, max_epochs=2).fit(module, small_data())
    assert "stream/H" in (tmp_path / "b" / "version_0" / "metrics.csv").read_text()
    assert (tmp_path / "a" / "version_0" / "report.json").exists()


def test_reference_rows_are_right_and_leave_no_trace(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    """METHODS 12: pretrained on everything; each expert on its own task, its control accuracies averaged."""
    rows = ReferenceRows()
    data = small_data()
    make_trainer(merge_callback(), rows).fit(module, data)
    assert_same_weights(module, direct(TASKS))
    zero_shot = ContinualMergeModule()
    make_trainer().validate(zero_shot, small_data(), verbose=False)
    assert rows.rows["pretrained"]["accuracies"] == {
        key: value for key, value in zero_shot.last_scores.items() if key not in ("ACC", "Gen", "H")
    }
    individual = rows.rows["individual"]
    assert individual["ACC"] == pytest.approx(sum(individual["accuracies"][task] for task in TASKS) / 3)
    assert individual["accuracies"]["mnist"] > rows.rows["pretrained"]["accuracies"]["mnist"] + 0.3


def test_published_scores_that_nobody_knows_are_not_asserted(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make
) -> None:
    rows = ReferenceRows(assert_scores=0.01)
    with pytest.raises(MisconfigurationException, match="SmallZoo knows no published scores"):
        make_trainer(merge_callback(), rows).fit(module, small_data())
    assert rows.rows == {}


def test_a_row_cut_short_is_refused(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, monkeypatch: Any
) -> None:
    """Trap 16: a validation that saw fewer images must not enter the matrix."""
    original = ContinualMergeModule.validation_step

    def skips_first(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx:
            original(self, batch, batch_idx, dataloader_idx)

    monkeypatch.setattr(ContinualMergeModule, "validation_step", skips_first)
    with pytest.raises(RuntimeError, match="only 24 of 40 images of 'font_category' were scored"):
        make_trainer(merge_callback()).fit(module, small_data())


def test_broken_weights_stop_the_evaluation(module: ContinualMergeModule, small_data: Make, make_trainer: Make) -> None:
    """A14: NaN logits are no answer."""
    module.configure_model()
    with torch.no_grad():
        module.backbone.vision_model.post_layernorm.weight.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(FloatingPointError, match="logits on 'font_category' hold NaN"):
        make_trainer().validate(module, small_data(), verbose=False)
