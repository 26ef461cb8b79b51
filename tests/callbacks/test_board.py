"""What TensorBoard shows of a stream: read from the event files, and in a real browser."""

import asyncio
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from browser import CHROMIUM, Page
from lightning.pytorch.loggers import TensorBoardLogger
from loops import TASKS as LOOP
from loops import Classifier, Tasks, accuracies, live
from small import CONTROLS, RANKS, TASKS, SmallZoo
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from safemerge_pl.callbacks import ReferenceRows, SAFEMergeCallback, StreamReport
from safemerge_pl.callbacks.board import log_layout
from safemerge_pl.module import ContinualMergeModule

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


class FewImages(SmallZoo):
    rows_kept = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a stream of two tasks, with a bound and with control sets."""
    logger = TensorBoardLogger(tmp_path_factory.mktemp("runs"), default_hp_metric=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=logger,
        max_epochs=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1,
        log_every_n_steps=1,
        callbacks=[
            SAFEMergeCallback(max_response=0.035, **RANKS),
            ReferenceRows(individual=False),
            StreamReport(),
        ],
    )
    trainer.fit(ContinualMergeModule(), FewImages(TASKS[:2], CONTROLS, batch_size=12, order_seed=42))
    return Path(logger.log_dir)


@pytest.fixture(scope="module")
def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def points(events: EventAccumulator, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in events.Scalars(tag)}


def layout(events: EventAccumulator) -> dict[str, dict[str, list[str]]]:
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG

    (tensor,) = events.Tensors(CONFIG_SUMMARY_TAG)
    found = Layout.FromString(tensor.tensor_proto.string_val[0])
    return {c.title: {chart.title: list(chart.multiline.tag) for chart in c.chart} for c in found.category}


def test_the_pretrained_model_is_step_0(events: EventAccumulator, folder: Path) -> None:
    row = json.loads((folder / "report.json").read_text())["references"]["pretrained"]
    for score in ("ACC", "Gen", "H"):
        found = points(events, f"stream/{score}")
        assert list(found) == [0, 1, 2]
        assert found[0] == pytest.approx(row[score])
    assert list(points(events, "stream/BWT")) == [2]
    for name in TASKS[:2]:
        assert points(events, f"task/{name}/acc")[0] == pytest.approx(row["accuracies"][name])
    assert points(events, f"control/{CONTROLS[0]}/acc")[0] == pytest.approx(row["accuracies"][CONTROLS[0]])


def test_charts_gather_the_scores_the_tasks_and_the_recovery_curves(events: EventAccumulator) -> None:
    """Each chart's patterns find the tags that are meant, as TensorBoard matches them, and no others."""
    import re

    found, tags = layout(events), events.Tags()["scalars"]
    matched = {
        title: {tag for pattern in patterns for tag in tags if re.match(pattern, tag)}
        for charts in found.values()
        for title, patterns in charts.items()
    }
    assert list(found) == ["merge stream", "recovery"]
    assert matched["ACC, Gen and H"] == {"stream/ACC", "stream/Gen", "stream/H"}
    assert matched["all tasks"] == {f"task/{name}/acc" for name in TASKS[:2]}
    assert matched["control sets"] == {f"control/{CONTROLS[0]}/acc"}
    assert len(matched["loss over the steps"]) == 2
    assert all(tag.startswith("recovery/") for tag in matched["loss over the steps"])


def test_the_report_is_there_as_text_and_the_matrix_as_a_picture(events: EventAccumulator, folder: Path) -> None:
    (text,) = events.Tensors("report/text_summary")
    written = text.tensor_proto.string_val[0].decode()
    assert (folder / "report.md").read_text().startswith(written[:200])
    assert "matrix.png" not in written  # no file can be shown there
    assert text.step == 2
    pictures = events.Images("stream/matrix")
    assert [picture.step for picture in pictures] == [1, 2]
    assert {picture.width for picture in pictures} == {700}  # twice what a card shows


def hparams(events: EventAccumulator) -> tuple[dict[str, str], list[str]]:
    from tensorboard.plugins.hparams import metadata

    content = events.summary_metadata
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG].plugin_data.content)
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG].plugin_data.content)
    return (
        {name: value.string_value for name, value in start.hparams.items()},
        [info.name.tag for info in experiment.metric_infos],
    )


def test_hparams_have_the_four_scores_and_one_column_before_them(events: EventAccumulator) -> None:
    settings, scores = hparams(events)
    assert scores == ["hp/ACC", "hp/Gen", "hp/H", "hp/BWT"]
    own = "scoring_rank=21, recovery_rank=11, task_rank=2, num_steps=5, order 42, 2 tasks"
    assert settings == {"method": f"SAFE-Merge, bound 0.035: {own}"}
    assert points(events, "hp/BWT").popitem()[1] == pytest.approx(points(events, "stream/BWT")[2])


def test_a_chart_that_would_stay_empty_is_left_out(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    trainer: Any = type("Trainer", (), {"loggers": [logger, object()]})()
    log_layout(trainer, controls=False, recovery=False)
    logger.save()
    found = EventAccumulator(logger.log_dir)
    found.Reload()
    assert {group: list(charts) for group, charts in layout(found).items()} == {
        "merge stream": ["ACC, Gen and H", "all tasks"]
    }


def test_a_training_loop_has_the_same_board(make_trainer: Any, tmp_path: Path) -> None:
    """One layout, a picture per merge, and the scores that are defined."""
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    merge = live(tasks=LOOP, score=lambda trainer, module: accuracies(module))
    make_trainer(merge, StreamReport(), logger=logger, max_epochs=4).fit(Classifier(), Tasks())
    found = EventAccumulator(logger.log_dir)
    found.Reload()
    assert list(layout(found)) == ["merge stream", "recovery"]
    assert [picture.step for picture in found.Images("stream/matrix")] == [1, 2]
    assert hparams(found)[1] == ["hp/ACC", "hp/BWT"]  # no control set: neither Gen. nor H


@pytest.fixture
def address(folder: Path) -> str:
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(argv=["", "--logdir", str(folder.parent), "--port", "0", "--load_fast", "false"])
    return str(board.launch())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to look at TensorBoard with")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_browser_shows_it(address: str, events: EventAccumulator) -> None:
    """Charts with all of their curves, the report as a table, the matrix, and the four scores inside of the window."""

    async def look() -> None:
        async with Page((1280, 900)) as page:
            await page.open(f"{address}#custom_scalars", "ACC, Gen and H", "all tasks", "control sets", "Matches (3)")
            await page.open(f"{address}#text", "SAFE-Merge, bound 0.035 on 2 tasks", "After each merge", TASKS[0])
            await page.open(f"{address}#images", "stream/matrix", "step 2")
            scores = {tag: f"{points(events, tag).popitem()[1]:#.5g}" for tag in hparams(events)[1]}
            text = await page.open(f"{address}#hparams", "SAFE-Merge, bound 0.035", *scores, *scores.values())
            assert "No hparams data was found" not in text
            for shown in [await page.find(word) for pair in scores.items() for word in pair]:
                assert shown[-1]["right"] <= 1280, shown  # the column's head, and below it the score

    asyncio.run(look())
