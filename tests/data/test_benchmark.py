"""The paper's full-size configurations on stand-ins: same names, classes, files and schemas, no hub, tiny models."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from command_line import environment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small import RANKS
from tiny_hub import BACKBONES, data_of, write_hub

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.callbacks import ReferenceRows, SAFEMergeCallback
from safemerge_pl.data.image_sets import CONTROLS, TASKS, find_spec
from safemerge_pl.methods import SafeMerge, TaskArithmetic
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.runtime.configs import config_folder
from safemerge_pl.study import Study, StudyRow

pytestmark = pytest.mark.usefixtures("datasets_apart")

FULL = sorted(path.name for path in config_folder().glob("clip_*.yaml"))


def module_of(benchmark: tuple[Path, Path]) -> ContinualMergeModule:
    return ContinualMergeModule(CLIPBackbone(str(benchmark[0]), image_backend="pil"))


@pytest.mark.parametrize("name", FULL)
def test_every_full_size_config_is_the_paper_s(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Parsed by the command line as it stands; settings as in the paper's table of settings."""
    from safemerge_pl.cli import main

    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", name, "--print_config"])
    assert not stop.value.code
    content = yaml.safe_load(capsys.readouterr().out)
    size, length = name.removesuffix(".yaml").split("_")[-2:]
    assert content["model"]["backbone"]["init_args"]["pretrained"] == f"openai/{BACKBONES[size]}"
    assert content["data"]["init_args"]["tasks"] == int(length)
    assert content["data"]["init_args"]["controls"] == list(CONTROLS)
    (merge,) = content["trainer"]["callbacks"]
    settings = merge["init_args"]
    assert settings["experts"] == f"tanganke/{BACKBONES[size]}_{{task}}"
    assert (settings["scoring_rank"], settings["recovery_rank"], settings["task_rank"]) == (128, 64, 8)
    assert (settings["plasticity"], settings["regularization"]) == (0.8, 0.1)
    assert (settings["num_steps"], settings["lr"], settings["utility_weight"]) == (50, 0.001, 1.0)
    assert settings["keep_ratio"] == {"b32": (0.5, 0.3)}.get(size, (0.7, 0.5))[length != "8"]


def test_there_is_a_config_for_every_backbone_and_stream() -> None:
    assert sorted(f"clip_vit_{size}_{length}.yaml" for size in BACKBONES for length in (8, 14, 20)) == FULL


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache in small with what the eight-task configuration reads."""
    datasets.disable_progress_bars()
    home = tmp_path_factory.mktemp("hf")
    write_hub(home / "hub", BACKBONES["b32"], TASKS[:8], CONTROLS)
    return home


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["check", "fit"])
def test_a_full_size_config_runs_whole(verb: str, hub: Path, tmp_path: Path) -> None:
    """Only `any_size` differs from the command in the file's head: models and sets come from a hub cache in small."""
    command = [sys.executable, "-m", "safemerge_pl", verb, "--config", "clip_vit_b32_8.yaml"]
    command += ["--data.init_args.order_seed", "42", "--data.init_args.any_size", "true"]
    command += ["--data.init_args.num_workers", "0", "--references.individual", "true"]
    places = {"HF_HOME": str(hub), "SAFEMERGE_CACHE": str(tmp_path / "cache")}
    run = subprocess.run(command, cwd=tmp_path, env=environment() | places, capture_output=True, text=True, timeout=170)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    if verb == "check":
        assert "no problem found" in run.stdout
        assert "8 tasks: eurosat, svhn, mnist, dtd, resisc45, gtsrb, sun397, stanford-cars" in run.stdout
        return
    folder = tmp_path / "runs" / "clip_vit_b32_8" / "version_0"
    content = json.loads((folder / "report.json").read_text())
    assert len(content["steps"]) == 8
    assert len(list((tmp_path / "cache" / "heads").iterdir())) == 3, "cars, ImageNet-R and ObjectNet have many texts"
    from transformers import CLIPModel, CLIPProcessor

    CLIPModel.from_pretrained(folder / "merged")
    CLIPProcessor.from_pretrained(folder / "merged")


def test_limit_and_prompts(benchmark: tuple[Path, Path]) -> None:
    data = data_of(benchmark, limit=4, prompts={"mnist": ["the digit {}"], "fer2013": "openai"})
    assert len(data.labelled_set("mnist")) == 4
    assert data.labelled_set("mnist").templates == ("the digit {}",)
    assert len(data.labelled_set("fer2013").templates) == 80
    assert data.settings() != data_of(benchmark).settings()
    with pytest.raises(ValueError, match="`limit` must be at least 1"):
        data_of(benchmark, limit=0)
    with pytest.raises(ValueError, match="`prompts` names dtd, which is neither a task nor a control"):
        data_of(benchmark, prompts={"dtd": "single"})
    with pytest.raises(ValueError, match="did you mean 'eurosat'"):
        data_of(benchmark, tasks=["eurosta"])


def counted(folder: Path, **counts: dict[str, int]) -> str:
    """Descriptions of the sets with known right answers for a backbone called ``tiny``."""
    for name, known in counts.items():
        spec = find_spec(name)
        content = {"hub": spec.hub, "split": spec.split, "image": spec.image, "label": spec.label, "size": 12}
        content |= {"classes": list(spec.classes), "templates": list(spec.templates), "counts": {"tiny": known}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return str(folder)


def test_known_right_answers_are_the_expected_scores(benchmark: tuple[Path, Path]) -> None:
    data = data_of(benchmark, published="clip-vit-base-patch32", tasks=["mnist", "eurosat"], controls=["imagenet"])
    assert data.expected == {
        "pretrained": {"mnist": 4826 / 10000, "eurosat": 1215 / 2700},
        "individual": {"mnist": 9958 / 10000, "eurosat": 2675 / 2700},
    }
    other = data_of(benchmark, published="clip-vit-base-patch32", prompts={"mnist": "single"})
    assert "mnist" not in other.expected["pretrained"], "other prompts have other right answers"
    assert data_of(benchmark, published="clip-vit-base-patch32", limit=3).expected == {}
    assert data_of(benchmark, published="clip-vit-huge-patch14").expected == data_of(benchmark).expected == {}


def test_known_counts_stop_a_run_that_differs(
    benchmark: tuple[Path, Path], tmp_path: Path, make_trainer: Callable[..., Any]
) -> None:
    """Another model or preprocessing is known before the stream starts, set, expected and found named."""
    experts = {task: str(benchmark[0].parent / task) for task in ("mnist", "eurosat")}

    def run(within: float | None, **settings: Any) -> ReferenceRows:
        rows = ReferenceRows(assert_scores=within)
        merge = SAFEMergeCallback(experts=experts, **RANKS)
        make_trainer(merge, rows, max_epochs=1).fit(module_of(benchmark), data_of(benchmark, **settings))
        return rows

    with pytest.raises(MisconfigurationException, match=r"mnist \d+\.\d+, published 48\.26"):
        run(0.001, published="clip-vit-base-patch32")
    with pytest.raises(MisconfigurationException, match="CLIPBenchmarkData knows no published scores"):
        run(0.001)
    row = run(None).rows
    right = {
        task: {
            "pretrained": round(12 * row["pretrained"]["accuracies"][task]),
            "expert": round(12 * row["individual"]["accuracies"][task]),
        }
        for task in experts
    }
    right["fer2013"] = {"pretrained": round(12 * row["pretrained"]["accuracies"]["fer2013"])}
    run(1e-9, sets=counted(tmp_path, **right), published="tiny")
    right["eurosat"]["expert"] += 1
    with pytest.raises(MisconfigurationException, match=r"the experts should score within 1 points .*: eurosat \d+"):
        run(0.01, sets=counted(tmp_path, **right), published="tiny")


def study_of(benchmark: tuple[Path, Path], folder: Path, **kwargs: Any) -> Study:
    rows = [StudyRow("SAFE-Merge", SafeMerge(**RANKS)), StudyRow("TA", TaskArithmetic())]
    data = {key: kwargs.pop(key) for key in ("limit", "sets", "published") if key in kwargs}
    return Study(
        CLIPBackbone(str(benchmark[0])),
        {"2": data_of(benchmark, **data)},
        rows,
        experts=str(benchmark[0].parent / "{task}"),
        orders=[42],
        folder=str(folder),
        **kwargs,
    )


def test_a_study_of_the_benchmarks(benchmark: tuple[Path, Path], tmp_path: Path) -> None:
    """The rows of a table; what is scored belongs to what a kept result depends on."""
    first = study_of(benchmark, tmp_path)
    first.run()
    assert {result["row"] for result in first.results} == {"SAFE-Merge", "TA"}
    assert set(first.references["2"]) == {"Pre-trained", "Individual"}
    kept = len(list((tmp_path / "cells").iterdir()))
    study_of(benchmark, tmp_path).run()
    assert len(list((tmp_path / "cells").iterdir())) == kept
    study_of(benchmark, tmp_path, limit=3, individual=False).run()
    assert len(list((tmp_path / "cells").iterdir())) == 2 * kept


def test_a_study_asserts_counts_before_the_experts(
    benchmark: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(benchmark, tmp_path, assert_scores=0.001, published="clip-vit-base-patch32")
    with pytest.raises(MisconfigurationException, match=r"the pretrained model should score .*published 48\.26"):
        study.run()
    assert "expert" not in capsys.readouterr().out
