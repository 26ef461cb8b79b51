"""The paper's full-size configurations on stand-ins: same names, classes, files and schemas, no hub, tiny models."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from command_line import environment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small import RANKS
from tiny_hub import write_clip, write_expert, write_hub, write_set

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.backbones.heads import zero_shot_head
from safemerge_pl.callbacks import ReferenceRows, SAFEMergeCallback
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.data.benchmark import CLIPBenchmarkData
from safemerge_pl.data.image_sets import CONTROLS, TASKS, find_spec
from safemerge_pl.methods import SafeMerge, TaskArithmetic
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.runtime.configs import config_folder
from safemerge_pl.scoring import Scorer
from safemerge_pl.study import Study, StudyRow

FULL = sorted(path.name for path in config_folder().glob("clip_*.yaml"))
BACKBONES = {"b32": "clip-vit-base-patch32", "b16": "clip-vit-base-patch16", "l14": "clip-vit-large-patch14"}


@pytest.fixture(autouse=True)
def quiet_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny CLIP of a known name with two experts, and a folder with their sets and one held-out set."""
    root = tmp_path_factory.mktemp("small")
    clip = write_clip(root / "models" / BACKBONES["b32"])
    for seed, task in enumerate(("mnist", "eurosat"), start=1):
        write_expert(root / "models" / task, clip, seed)
    for name in ("mnist", "eurosat", "fer2013", "pcam"):
        write_set(root / "sets" / name, name, 12)
    return root / "models" / BACKBONES["b32"], root / "sets"


def data_of(model: tuple[Path, Path], **kwargs: Any) -> CLIPBenchmarkData:
    settings: dict[str, Any] = {"tasks": ["mnist", "eurosat"], "controls": ["fer2013"], "num_workers": 0}
    settings |= {"folder": str(model[1]), "any_size": True, "batch_size": 5}
    return CLIPBenchmarkData(**{**settings, **kwargs})


def module_of(model: tuple[Path, Path]) -> ContinualMergeModule:
    return ContinualMergeModule(CLIPBackbone(str(model[0]), image_backend="pil"))


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


def test_scores_equal_counting_by_hand(model: tuple[Path, Path], make_trainer: Callable[..., Any]) -> None:
    """K10: boolean labels, a web data set and parquet files, in batches that do not divide the sets."""
    module, trainer = module_of(model), make_trainer()
    trainer.validate(module, data_of(model, tasks=["pcam", "eurosat"]), verbose=False)
    for name in ("pcam", "eurosat", "fer2013"):
        rows = data_of(model, tasks=["pcam", "eurosat"]).labelled_set(name).rows[:]
        with torch.inference_mode():
            logits = module(module.backbone.preprocess(rows["image"]), name)
        right = sum(int(a == int(b)) for a, b in zip(logits.argmax(1).tolist(), rows["label"], strict=True))
        assert module.last_scores[name] == right / 12


def test_workers_decode_the_same(model: tuple[Path, Path], make_trainer: Callable[..., Any]) -> None:
    scores = []
    for workers in (0, 2):
        module = module_of(model)
        make_trainer().validate(module, data_of(model, num_workers=workers), verbose=False)
        scores.append(module.last_scores)
    assert scores[0] == scores[1]


def test_limit_and_prompts(model: tuple[Path, Path]) -> None:
    data = data_of(model, limit=4, prompts={"mnist": ["the digit {}"], "fer2013": "openai"})
    assert len(data.labelled_set("mnist")) == 4
    assert data.labelled_set("mnist").templates == ("the digit {}",)
    assert len(data.labelled_set("fer2013").templates) == 80
    assert data.settings() != data_of(model).settings()
    with pytest.raises(ValueError, match="`limit` must be at least 1"):
        data_of(model, limit=0)
    with pytest.raises(ValueError, match="`prompts` names dtd, which is neither a task nor a control"):
        data_of(model, prompts={"dtd": "single"})
    with pytest.raises(ValueError, match="did you mean 'eurosat'"):
        data_of(model, tasks=["eurosta"])


def test_all_missing_sets_are_named_at_once(model: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=r"set 'dtd'.*does not exist") as caught:
        data_of(model, tasks=["mnist", "dtd", "kmnist"]).setup("fit")
    assert [line.split("'")[1] for line in str(caught.value).splitlines()] == ["dtd", "kmnist"]


def test_an_image_that_cannot_be_decoded_is_named(model: tuple[Path, Path], tmp_path: Path) -> None:
    write_set(tmp_path / "mnist", "mnist", 4)
    path = tmp_path / "mnist" / "data" / "test-00000-of-00001.parquet"
    rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "c")).cast_column(
        "image", datasets.Image(decode=False)
    )
    broken = [{"bytes": b"no image", "path": None}, *rows["image"][1:]]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict({"image": broken, "label": [0, 1, 2, 3]}, features=features).to_parquet(path)
    data = data_of(model, tasks=["mnist"], controls=[], folder=str(tmp_path))
    backbone = CLIPBackbone(str(model[0]))
    dataset: Any = data.dataset("mnist", backbone)
    dataset.__getitems__([1, 3])
    with pytest.raises(ValueError, match=r"set 'mnist': one of the images 0 to 2 cannot be decoded .*; fetch the set"):
        dataset.__getitems__([0, 2])


def counted(folder: Path, **counts: dict[str, int]) -> str:
    """Descriptions of the sets with known right answers for a backbone called ``tiny``."""
    for name, known in counts.items():
        spec = find_spec(name)
        content = {"hub": spec.hub, "split": spec.split, "image": spec.image, "label": spec.label, "size": 12}
        content |= {"classes": list(spec.classes), "templates": list(spec.templates), "counts": {"tiny": known}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return str(folder)


def test_known_right_answers_are_the_expected_scores(model: tuple[Path, Path]) -> None:
    data = data_of(model, published="clip-vit-base-patch32", tasks=["mnist", "eurosat"], controls=["imagenet"])
    assert data.expected == {
        "pretrained": {"mnist": 4826 / 10000, "eurosat": 1215 / 2700},
        "individual": {"mnist": 9958 / 10000, "eurosat": 2675 / 2700},
    }
    other = data_of(model, published="clip-vit-base-patch32", prompts={"mnist": "single"})
    assert "mnist" not in other.expected["pretrained"], "other prompts have other right answers"
    assert data_of(model, published="clip-vit-base-patch32", limit=3).expected == {}
    assert data_of(model, published="clip-vit-huge-patch14").expected == data_of(model).expected == {}


def test_known_counts_stop_a_run_that_differs(
    model: tuple[Path, Path], tmp_path: Path, make_trainer: Callable[..., Any]
) -> None:
    """N9: another model or preprocessing is known before the stream starts, set, expected and found named."""
    experts = {task: str(model[0].parent / task) for task in ("mnist", "eurosat")}

    def run(within: float | None, **settings: Any) -> ReferenceRows:
        rows = ReferenceRows(assert_scores=within)
        merge = SAFEMergeCallback(experts=experts, **RANKS)
        make_trainer(merge, rows, max_epochs=1).fit(module_of(model), data_of(model, **settings))
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


def study_of(model: tuple[Path, Path], folder: Path, **kwargs: Any) -> Study:
    rows = [StudyRow("SAFE-Merge", SafeMerge(**RANKS)), StudyRow("TA", TaskArithmetic())]
    data = {key: kwargs.pop(key) for key in ("limit", "sets", "published") if key in kwargs}
    return Study(
        CLIPBackbone(str(model[0])),
        {"2": data_of(model, **data)},
        rows,
        experts=str(model[0].parent / "{task}"),
        orders=[42],
        folder=str(folder),
        **kwargs,
    )


def test_a_study_of_the_benchmarks(model: tuple[Path, Path], tmp_path: Path) -> None:
    """The rows of a table; what is scored belongs to what a kept result depends on."""
    first = study_of(model, tmp_path)
    first.run()
    assert {result["row"] for result in first.results} == {"SAFE-Merge", "TA"}
    assert set(first.references["2"]) == {"Pre-trained", "Individual"}
    kept = len(list((tmp_path / "cells").iterdir()))
    study_of(model, tmp_path).run()
    assert len(list((tmp_path / "cells").iterdir())) == kept
    study_of(model, tmp_path, limit=3, individual=False).run()
    assert len(list((tmp_path / "cells").iterdir())) == 2 * kept


def test_a_study_asserts_counts_before_the_experts(
    model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(model, tmp_path, assert_scores=0.001, published="clip-vit-base-patch32")
    with pytest.raises(MisconfigurationException, match=r"the pretrained model should score .*published 48\.26"):
        study.run()
    assert "expert" not in capsys.readouterr().out


def test_scores_are_kept(model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation that was interrupted goes on; other weights, prompts, images or fewer of them are other scores."""
    monkeypatch.setenv("SAFEMERGE_CACHE", str(tmp_path / "kept"))
    backbone = CLIPBackbone(str(model[0]))
    backbone.load()
    scored = []
    real = Scorer.count

    def counting(self: Scorer, name: str, batch: Any) -> None:
        scored.append(name)
        real(self, name, batch)

    monkeypatch.setattr(Scorer, "count", counting)

    def score(name: str = "eurosat", **settings: Any) -> float:
        scored.clear()
        return Scorer(backbone, data_of(model, **settings)).score(name)

    first = score()
    assert len(scored) == 3
    assert score() == first
    assert scored == []
    (file,) = (tmp_path / "kept" / "scores").iterdir()
    file.write_text("{")
    assert score() == first
    assert len(scored) == 3
    for settings in ({"limit": 5}, {"prompts": {"eurosat": "single"}}):
        score(**settings)
        assert scored
    with torch.no_grad():
        backbone.vision_model.encoder.layers[0].mlp.fc1.weight.mul_(3)
    score()
    assert scored
    assert len(list(file.parent.iterdir())) == 4


def test_a_head_of_many_texts_is_kept(
    model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the same from the cache; another text tower, text or tokenizer is another head."""
    backbone = CLIPBackbone(str(model[0]))
    backbone.load()
    key = backbone.text_key()
    backbone._text.pop("key")
    spec = find_spec("stanford-cars")
    plain = zero_shot_head(backbone, spec.classes, spec.templates)
    monkeypatch.setenv("SAFEMERGE_CACHE", str(tmp_path / "kept"))
    first = zero_shot_head(backbone, spec.classes, spec.templates)
    (file,) = (tmp_path / "kept" / "heads").iterdir()
    assert torch.equal(plain, first)
    assert backbone.text_key() == key  # what the tokenizer last did is not what it is
    with monkeypatch.context() as inner:
        inner.setattr(CLIPBackbone, "encode_text", None)
        assert torch.equal(zero_shot_head(backbone, spec.classes, spec.templates), first)
    file.write_bytes(b"damaged")
    assert torch.equal(zero_shot_head(backbone, spec.classes, spec.templates), first)
    zero_shot_head(backbone, spec.classes[::-1], spec.templates)
    other = CLIPBackbone(str(model[0]))
    other.load()
    assert other.text_key() == backbone.text_key()
    other._text.pop("key")
    with torch.no_grad():
        other._text["projection"].weight[0, 0] += 1
    assert other.text_key() != backbone.text_key()
    zero_shot_head(other, spec.classes, spec.templates)
    assert len(list(file.parent.iterdir())) == 3


def test_a_cache_that_cannot_be_written_costs_only_time(
    model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAFEMERGE_CACHE", str(tmp_path / "file"))
    backbone = CLIPBackbone(str(model[0]))
    backbone.load()
    assert zero_shot_head(backbone, [str(index) for index in range(1024)], ["{}"]).shape == (1024, 8)


def test_preprocessing_as_the_paper_s_pipeline(model: tuple[Path, Path], tmp_path: Path) -> None:
    """PIL's resizing and torchvision's differ by rounding; the one asked for is the one used, also elsewhere."""
    import pickle

    import numpy
    from tiny_hub import picture

    images = [picture(index, 40) for index in range(3)]
    pil = CLIPBackbone(str(model[0]), image_backend="pil").preprocess(images)
    other = CLIPBackbone(str(model[0]))
    assert pil.shape == other.preprocess(images).shape == (3, 3, 16, 16)
    resized = numpy.asarray(images[0].resize((16, 16), 3))
    expected = torch.tensor(resized).permute(2, 0, 1) / 255
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    torch.testing.assert_close(pil[0], (expected - mean) / std, atol=1e-5, rtol=0)
    sent = pickle.dumps(other.preprocessor())
    assert len(sent) < 10_000
    assert torch.equal(pickle.loads(sent)(images), other.preprocess(images))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        CLIPBackbone(str(tmp_path)).preprocess(images)


def test_a_text_that_is_too_long_for_the_tower(model: tuple[Path, Path]) -> None:
    backbone = CLIPBackbone(str(model[0]))
    backbone.load()
    with pytest.raises(ValueError, match="the text tower takes 320 tokens, which 'zzz"):
        backbone.encode_text(["z" * 2000, "short"])
