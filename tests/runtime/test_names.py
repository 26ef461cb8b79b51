"""A name where a list of names belongs, and names that are nearly right, wherever a user gives them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tiny import fast_method

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.backbones.heads import zero_shot_head
from safemerge_pl.callbacks import MergeCallback, SAFEMergeCallback
from safemerge_pl.data import CLIPBenchmarkData, GLUEData, ZooData
from safemerge_pl.data.experts import find_experts
from safemerge_pl.data.stream import TaskStream
from safemerge_pl.errors import UnknownOptionError
from safemerge_pl.hf_trainer import MergeTrainerCallback
from safemerge_pl.live import LiveMerger
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import TaskArithmetic
from safemerge_pl.metrics import AccuracyMatrix
from safemerge_pl.runtime.names import name_list
from safemerge_pl.study import Study, StudyFigure, StudyRow

FC1 = "encoder.layers.0.mlp.fc1.weight"


def live() -> LiveMerger:
    return LiveMerger(torch.nn.Sequential(torch.nn.Linear(2, 2)), layers="*weight")


def study(**options: Any) -> Study:
    rows = [StudyRow("a", TaskArithmetic())]
    return Study(CLIPBackbone("zoo"), {"two": ZooData(tasks=["mnist", "flags"])}, **({"rows": rows} | options))


@pytest.mark.parametrize(
    ("take", "taken"),
    [
        (lambda: list(TaskStream("mnist")), ["mnist"]),
        (lambda: list(ZooData(tasks="mnist").stream), ["mnist"]),
        (lambda: list(ZooData(tasks=["mnist"], controls="clipart_category").controls), ["clipart_category"]),
        (lambda: list(GLUEData(tasks="cola", controls="rte").stream), ["cola"]),
        (lambda: list(GLUEData(tasks="cola", controls="rte").controls), ["rte"]),
        (lambda: list(CLIPBenchmarkData(tasks="mnist", controls="imagenet").stream), ["mnist"]),
        (lambda: list(CLIPBenchmarkData(tasks="mnist", controls="imagenet").controls), ["imagenet"]),
        (lambda: list(find_experts("zoo", "mnist")), ["mnist"]),
        (lambda: list(AccuracyMatrix("mnist", "probe").tasks), ["mnist"]),
        (lambda: list(AccuracyMatrix("mnist", "probe").controls), ["probe"]),
        (lambda: ContinualMerger(tiny.tower(), fast_method(), layers=FC1).plan.parameters, [FC1]),
        (lambda: live().plan.parameters, ["0.weight"]),
        (lambda: MergeTrainerCallback(live(), tasks="mnist").tasks, ["mnist"]),
        (lambda: MergeCallback(boundary="fit", tasks="mnist").live.planned, ["mnist"]),  # type: ignore[union-attr]
        (
            lambda: MergeCallback(epochs_per_task=1, metric="acc", controls="mnist").live.scores.controls,  # type: ignore[union-attr]
            ("mnist",),
        ),
        (lambda: study(sets="mnist").sets, ["mnist"]),
        (lambda: study(orders=42).orders, [42]),
        (lambda: StudyFigure("a.png", "H", "BWT").y, ["BWT"]),  # type: ignore[arg-type]
        (lambda: StudyFigure("a.png", "H", ["BWT"], rows="row").rows, ["row"]),  # type: ignore[arg-type]
        (
            lambda: [row[0] for row in StudyRow("a", TaskArithmetic(), vary={"scaling": 0.5}).methods("x")],  # type: ignore[dict-item]
            [{"scaling": 0.5}],
        ),
    ],
)
def test_one_name_is_a_list_of_one(take: Callable[[], Any], taken: Any) -> None:
    """Not its letters, of which some may even be names."""
    assert take() == taken


def test_the_names_of_a_head_are_no_letters() -> None:
    backbone = CLIPBackbone("zoo")
    backbone.load()
    assert len(zero_shot_head(backbone, "cat", "a photo of a {}.")) == 1


@pytest.mark.parametrize("given", [{"a", "b"}, {"a": 1}, b"ab", 3, ["a", 1], ["a", None], [True]])
def test_what_is_no_list_of_names_is_refused(given: Any) -> None:
    """A set has no order to merge in; a number in a configuration lacks its quotes."""
    with pytest.raises(ValueError, match="`tasks` must be a list of names"):
        name_list(given, "tasks")
    with pytest.raises(ValueError, match="`tasks` must be a list of names"):
        TaskStream(given)


# options


@pytest.mark.parametrize("kind", [MergeCallback, SAFEMergeCallback])
@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"metrics": "acc"}, "metric"),
        ({"metrics": "acc", "epochs_per_task": 1}, "metric"),
        ({"epoch_per_task": 1}, "epochs_per_task"),
        ({"layer": ["*"]}, "layers"),
        ({"expert": "zoo"}, "experts"),
        ({"restart": "merged", "boundary": "fit"}, "restart_from"),
    ],
)
def test_an_unknown_option_of_a_callback_is_an_error(kind: Any, options: dict[str, Any], meant: str) -> None:
    """With another option beside it, it was silently left out; alone it was called one of a training loop."""
    wrong = next(iter(options))
    with pytest.raises(UnknownOptionError, match=f"{kind.__name__} has no option '{wrong}'; did you mean '{meant}'"):
        kind(**options)


def test_options_of_safe_merge_and_of_a_class_of_ones_own_are_known() -> None:
    class Mine(SAFEMergeCallback):
        def __init__(self, note: str = "", **options: Any) -> None:
            super().__init__(**options)

    assert Mine(note="a", keep_ratio=0.3).method.keep_ratio == 0.3  # type: ignore[attr-defined]
    with pytest.raises(UnknownOptionError, match="Mine has no option 'keep_ration'; did you mean 'keep_ratio'"):
        Mine(keep_ration=0.3)
    with pytest.raises(ValueError, match="give `method` to MergeCallback"):
        SAFEMergeCallback(method=TaskArithmetic())  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [LiveMerger, ContinualMerger])
def test_an_unknown_option_of_a_merger_is_an_error_with_the_right_one(kind: Any) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} has no option 'layer'; did you mean 'layers'"):
        kind(torch.nn.Linear(2, 2), layer=["*"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vary": {"scalling": [1.0]}}, "row 'a': TaskArithmetic has no setting 'scalling'; did you mean 'scaling'"),
        ({"at": {"two": {"scale": 1.0}}}, "row 'a': TaskArithmetic has no setting 'scale'; did you mean 'scaling'"),
        ({"at": {"tow": {"scaling": 1.0}}}, "row 'a', `at`: the study has no stream 'tow'; did you mean 'two'"),
    ],
)
def test_unknown_settings_and_streams_of_a_row_are_errors(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A stream of another name was silently measured with the settings of all others."""
    with pytest.raises(MisconfigurationException, match=message):
        study(rows=[StudyRow("a", TaskArithmetic(), **options)], folder=str(tmp_path)).run()
