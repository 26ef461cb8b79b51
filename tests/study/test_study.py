"""Studies: cells measured once, resumed, aggregated as the paper does; bad studies refused before they start."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small import CONTROLS, RANKS, TASKS, SmallZoo

from safemerge_pl.backbones import Backbone, CLIPBackbone, OpenCLIPBackbone, T5Backbone
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.data import GLUEData, StreamDataModule, ZooData
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, SafeMerge, SafeShare, TaskArithmetic
from safemerge_pl.reports.study import latex, markdown
from safemerge_pl.study import Study, StudyFigure, StudyRow
from safemerge_pl.study.bench import Bench


def study(folder: Path, rows: list[StudyRow] | None = None, **kwargs: Any) -> Study:
    if rows is None:
        rows = [
            StudyRow("SAFE-Merge", SafeMerge(**RANKS), vary={"keep_ratio": [0.3, 0.7]}),
            StudyRow("Task Arithmetic", TaskArithmetic(), at={"three": {"scaling": 0.1}}),
        ]
    streams = {"three": SmallZoo(TASKS, CONTROLS, batch_size=40)}
    settings: dict[str, Any] = {"orders": [42, 43], "folder": str(folder), **kwargs}
    return Study(CLIPBackbone(), streams, rows, **settings)  # type: ignore[arg-type]


def test_a_study_from_start_to_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [
        StudyFigure("ratio.png", "keep_ratio", ["Gen", "clipart_category"]),
        StudyFigure("trade.png", "Gen", ["ACC"], rows=["SAFE-Merge"]),
    ]
    done = study(tmp_path, figures=figures, overhead=True)
    done.run()
    assert {"table.md", "table.tex", "study.json", "ratio.png", "trade.png", "cells"} == {
        p.name for p in tmp_path.iterdir()
    }
    content = json.loads((tmp_path / "study.json").read_text())
    assert len(content["cells"]) == 6
    orders = {tuple(cell["tasks"]) for cell in content["cells"]}
    assert len(orders) == 2
    arithmetic = [cell for cell in content["cells"] if cell["row"] == "Task Arithmetic"]
    assert all(cell["settings"] == {"scaling": 0.1} for cell in arithmetic)
    for cell in content["cells"]:
        last, then = cell["accuracies"], cell["when_merged"]
        assert cell["ACC"] == pytest.approx(statistics.fmean(last[task] for task in TASKS))
        assert cell["BWT"] == pytest.approx(statistics.fmean(last[t] - then[t] for t in cell["tasks"][:-1]))
        assert cell["H"] == pytest.approx(2 * cell["ACC"] * cell["Gen"] / (cell["ACC"] + cell["Gen"]))
    assert set(content["references"]["three"]) == {"Pre-trained", "Individual"}
    capsys.readouterr()
    again = study(tmp_path, figures=figures, overhead=True)
    again.run()
    printed = capsys.readouterr().out
    assert printed.count("(known)") == 6
    assert "expert" not in printed
    assert markdown(again.collect()).splitlines()[:12] == markdown(done.collect()).splitlines()[:12]
    assert r"SAFE-Merge, keep\_ratio=0.3 & " in latex(again.collect())


def test_the_bound_is_varied_like_a_setting_of_the_method() -> None:
    row = StudyRow("a", TaskArithmetic(), vary={"max_response": [None, 0.02]}, at={"long": {"scaling": 0.1}})
    assert [(varied, bound) for varied, _, bound, _ in row.methods("short")] == [
        ({"max_response": None}, None),
        ({"max_response": 0.02}, 0.02),
    ]
    by_stream = StudyRow("b", TaskArithmetic(), at={"long": {"max_response": 0.05}}, max_response=0.02)
    assert [[bound for *_, bound, _ in by_stream.methods(stream)] for stream in ("short", "long")] == [[0.02], [0.05]]


def test_the_drift_is_bounded_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody knows what noise the model takes, before the first cell."""
    rows = [StudyRow("sum", TaskArithmetic(), vary={"max_drift": [0.001, None]})]
    done = study(tmp_path / "runs", rows, orders=[42], pretrained=False, individual=False)
    done.run()
    bounded, free = done.results
    assert 0 < bounded["drift"] <= 0.001 < free["drift"]
    assert bounded["settings"]["max_drift"] == 0.001
    assert "max_drift" not in free["settings"]
    monkeypatch.setattr(CLIPBackbone, "noise", lambda self, count: None)
    with pytest.raises(MisconfigurationException, match="row 'sum': `max_drift`: nobody knows what noise"):
        study(tmp_path / "more", rows).run()
    assert not (tmp_path / "more").exists()
    with pytest.raises(MisconfigurationException, match="row 'sum': `max_drift` must be a number"):
        study(tmp_path / "more", [StudyRow("sum", TaskArithmetic(), max_drift=3)]).run()


def test_rows_merge_the_layers_that_they_name(tmp_path: Path) -> None:
    """The built-in choice leaves the second feed-forward matrices out; the response counts what is merged."""
    rows = [StudyRow("usual", TaskArithmetic()), StudyRow("second", TaskArithmetic(), layers="*mlp.fc2.weight")]
    done = study(tmp_path / "runs", rows, orders=[42], pretrained=False, individual=False)
    done.run()
    usual, second = done.results
    assert "layers" not in usual["settings"]
    assert second["settings"]["layers"] == ["*mlp.fc2.weight"]
    backbone = CLIPBackbone()
    backbone.load()
    merger = ContinualMerger(backbone.vision_model, TaskArithmetic(), layers="*mlp.fc2.weight")  # type: ignore[arg-type]
    for task in second["tasks"]:
        merger.fold(done.sources["three"][task], task)
    assert second["merged"] == merger.fingerprint() != usual["merged"]
    with pytest.raises(MisconfigurationException, match="row 'second': `layers` pattern 'fc3' matches none"):
        study(tmp_path / "more", [StudyRow("second", TaskArithmetic(), layers="fc3")]).run()
    assert not (tmp_path / "more").exists()


def test_rows_may_say_what_holds_for_streams_of_other_lengths(tmp_path: Path) -> None:
    rows = [StudyRow("sum", TaskArithmetic(), at={"14": {"scaling": 0.1}, "20": {"scaling": 0.2}})]
    assert study(tmp_path, rows).check() == [
        "the study has no stream 14 or 20; what rows set for it under `at` is not used"
    ]
    rows = [StudyRow("sum", TaskArithmetic(), at={"three": {"scaling": 0.1}})]
    assert study(tmp_path, rows).check() == []


def test_a_method_that_does_not_fit_the_model_is_refused_before_the_first_cell(tmp_path: Path) -> None:
    rows = [StudyRow("sum", TaskArithmetic()), StudyRow("share", SafeShare(), vary={"shared_rank": [32, 129]})]
    with pytest.raises(MisconfigurationException, match="row 'share': `shared_rank` is 129"):
        study(tmp_path, rows).run()
    assert not list(tmp_path.iterdir())


def test_a_cell_equals_the_stream_under_lightning(tmp_path: Path, make_trainer: Any, module: Any) -> None:
    from safemerge_pl.callbacks import MergeCallback

    one = study(tmp_path, [StudyRow("OPCM", OPCM())], orders=[None], individual=False, pretrained=False)
    one.run()
    merge = MergeCallback(OPCM())
    make_trainer(merge).fit(module, SmallZoo(TASKS, CONTROLS, batch_size=16))
    (cell,) = one.results
    assert cell["merged"] == merge.reports[-1].merged
    for name in ("ACC", "Gen", "H", "BWT"):
        assert cell[name] == pytest.approx(module.last_scores[name])


def test_an_interrupted_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = Bench._measure_cell

    def breaks(self: Bench, *args: Any) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(Bench, "_measure_cell", breaks)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path, individual=False).run()
    assert len([p for p in (tmp_path / "cells").iterdir() if not p.name.startswith("references")]) == 2
    study(tmp_path, individual=False).run()
    assert len(calls) == 3 + 4
    # another setting of one row measures that row alone
    changed = [
        StudyRow("SAFE-Merge", SafeMerge(**RANKS), vary={"keep_ratio": [0.3, 0.7]}),
        StudyRow("b", TaskArithmetic(0.2)),
    ]
    study(tmp_path, changed, individual=False).run()
    assert len(calls) == 3 + 4 + 2


@pytest.mark.parametrize(
    ("backbone", "data", "cell", "references"),
    [
        (
            T5Backbone("a/b"),
            GLUEData(["cola", "mrpc"], ["rte"]),
            "88fd308f796ede65662c7fd8",
            "3f57f610b94ecd0efd7d70a0",
        ),
        (
            OpenCLIPBackbone("ViT-B-32", "c/d"),
            ZooData(["mnist", "flags"], ["probe1_seen_styles"]),
            "7f1a49065214c3a924eb14ee",
            "a688c189e23275b3f4664779",
        ),
        (
            CLIPBackbone("zoo"),
            ZooData(["mnist", "flags"], ["probe1_seen_styles"]),
            "39f45a8fde7bf23b2072ae87",
            "291e450ec59ad8c3221b5d2e",
        ),
    ],
)
def test_cells_of_version_0_1_0_are_found(
    backbone: Backbone, data: StreamDataModule, cell: str, references: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hashes are what that version computed, when the classes had other paths."""
    monkeypatch.setattr("safemerge_pl.study.kept.__version__", "0.1.0")
    one = Study(backbone, {"two": data}, [StudyRow("OPCM", OPCM())], orders=[42], folder="out")
    one.sources = {"two": {task: f"nowhere/{task}" for task in data.stream}}
    assert [one._path(each).stem for each in one.cells()] == [cell]
    assert one._hash("two", {}) == references


def test_an_error_in_another_process_is_told(tmp_path: Path) -> None:
    """What was measured before it stays."""
    broken = tmp_path / "models" / "weather"
    broken.mkdir(parents=True)
    (broken / "model.safetensors").write_bytes(b"nothing")
    experts = [str(tmp_path / "models"), "zoo"]
    with pytest.raises(CheckpointError, match="weather"):
        study(tmp_path / "out", experts=experts, individual=False, pretrained=False, jobs=2).run()


@pytest.mark.parametrize(
    ("rows", "kwargs", "message"),
    [
        ([StudyRow("a", OPCM(), vary={"keep_ratio": [0.5]})], {}, "row 'a': .*keep_ratio"),
        (
            [StudyRow("a", SafeMerge(), vary={"keep_ratio": [0.5, 1.5]})],
            {},
            r"row 'a': `keep_ratio` must be in \[0, 1\]",
        ),
        ([StudyRow("a", OPCM()), StudyRow("a", OPCM())], {}, "`rows` must be distinct"),
        ([], {}, "`rows` must be distinct and not empty"),
        (
            None,
            {"figures": [StudyFigure("f.png", "keep_ration", ["ACC"])]},
            "figure 'f.png': the study has no keep_ration",
        ),
        (None, {"figures": [StudyFigure("f.png", "keep_ratio", ["acc"])]}, "no acc"),
        (None, {"sets": ["wether"]}, "`sets`: no stream has a set wether"),
        (None, {"assert_scores": 0.01}, "SmallZoo knows no published scores"),
        (None, {"jobs": 0}, "`jobs` must be at least 1, got 0"),
        (None, {"experts": "nowhere"}, "task 'weather' has no model: nowhere/weather"),
    ],
)
def test_bad_studies_are_refused_before_they_measure(
    rows: list[StudyRow] | None, kwargs: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        study(tmp_path / "out", rows, **kwargs).run()
    assert not (tmp_path / "out").exists()
