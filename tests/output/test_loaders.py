"""Outputs that load with the library of their base: file names, indexes, further weights, and what the card says."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny import Tensors, tower, tuned

from safemerge_pl.checkpoints import open_checkpoint
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.output.files import MASTER_FILE, STATE_FILE, is_weights
from safemerge_pl.output.side_files import output_notes

DIT = {
    f"transformer_blocks.{i}.attn1.{part}.weight": tiny.randn(16, 16, seed=i)
    for i in range(2)
    for part in ("to_q", "to_k")
}
MISTRAL = {
    f"layers.{i}.feed_forward.{part}.weight": tiny.randn(16, 16, seed=i) for i in range(2) for part in ("w1", "w2")
}
OTHER_FORMS = ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "tf_model.h5", "flax_model.msgpack", "old.ckpt"]
OTHER_FORMS += ["pytorch_model.bin.index.json", "rust_model.ot", "a.gguf", "model.fp16.safetensors", "model.onnx"]
TRAINING = ["trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth"]
TRAINING += [
    "rng_state_0.pth",
    "training_args.bin",
    "random_states_0.pkl",
    "all_results.json",
    "events.out.tfevents.1.x",
]


def base_of(path: Path, file: str, tensors: Mapping[str, Any], **files: Any) -> Path:
    """A model folder with its weights under a name; two shards where the name is an index."""
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    if file.endswith(".bin"):
        torch.save(dict(tensors), path / file)
    elif file.endswith(".index.json"):
        stem, names = file.partition(".")[0], list(tensors)
        shards = {f"{stem}-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
        for shard, held in shards.items():
            save_file({name: tensors[name] for name in held}, path / shard)
        index = {name: shard for shard, held in shards.items() for name in held}
        (path / file).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    else:
        save_file(dict(tensors), path / file)
    return path


def merged_into(out: Path, base: Path, patterns: list[str] | None = None, **options: Any) -> tuple[Tensors, Path]:
    """What is merged, and the folder that it is written into."""
    merger = ContinualMerger(base, tiny.fast_method(), layers=patterns)
    merger.fold(tuned(dict(open_checkpoint(base)), 1), "a")
    return merger.merged, merger.save(out, **options)


def weights_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if is_weights(path) and not path.name.startswith("merge_master")}


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


DIFFUSERS = {"_class_name": "DiTTransformer2DModel", "num_layers": 2}


@pytest.mark.parametrize(
    ("file", "written"),
    [
        ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors"),
        ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors"),
        ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.safetensors"),
        ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"),
    ],
)
def test_a_part_of_a_pipeline_keeps_the_names_of_diffusers(file: str, written: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", file, DIT, config=DIFFUSERS)
    tensors, out = merged_into(tmp_path / "out", base, ["*to_?.weight"])
    assert weights_in(out) == {written}
    tiny.assert_same(load_file(out / written), tensors)
    assert "`diffusers.DiTTransformer2DModel.from_pretrained(folder)` loads it" in card_of(out)
    assert "AutoModel" not in card_of(out)
    assert "library_name: diffusers" in card_of(out)


def test_shards_of_diffusers_have_its_index(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "diffusion_pytorch_model.safetensors", DIT, config=DIFFUSERS)
    tensors, out = merged_into(tmp_path / "out", base, ["*to_?.weight"], max_shard_size=2100)
    index = json.loads((out / "diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    tiny.assert_same(dict(open_checkpoint(out)), tensors)


@pytest.mark.parametrize("params", [True, False])
def test_files_of_mistral_inference_keep_their_name_and_stay_whole(params: bool, tmp_path: Path) -> None:
    """It reads one file; without its ``params.json`` no loader is named."""
    files = {"params": {"dim": 16}} if params else {}
    base = base_of(tmp_path / "base", "consolidated.safetensors", MISTRAL, **files)
    (base / "tokenizer.model.v3").write_bytes(b"\x00")
    tensors, out = merged_into(tmp_path / "out", base, ["*.w?.weight"], max_shard_size=1000)
    assert weights_in(out) == {"consolidated.safetensors"}
    tiny.assert_same(load_file(out / "consolidated.safetensors"), tensors)
    assert (out / "tokenizer.model.v3").exists()
    assert ("`mistral_inference.transformer.Transformer.from_folder(folder)`" in card_of(out)) == params
    assert "AutoModel" not in card_of(out)


def test_shards_of_mistral_stay_shards(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "consolidated.safetensors.index.json", MISTRAL, params={})
    tensors, out = merged_into(tmp_path / "out", base, ["*.w?.weight"], max_shard_size=2100)
    assert "consolidated.safetensors.index.json" in weights_in(out)
    tiny.assert_same(dict(open_checkpoint(out)), tensors)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_timm_loads_the_output_whatever_the_size(file: str, tmp_path: Path) -> None:
    import timm

    settings = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **settings)
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 3,
        "pretrained_cfg": {"input_size": [3, 32, 32], "num_classes": 3},
        "model_args": settings,
    }
    base = base_of(tmp_path / "base", file, model.state_dict(), config=config)
    tensors, out = merged_into(tmp_path / "out", base, max_shard_size=10_000)
    assert weights_in(out) == {"model.safetensors"}
    assert "`timm.create_model('local-dir:' + folder, pretrained=True)` loads it" in card_of(out)
    assert "AutoModel" not in card_of(out)
    found = timm.create_model(f"local-dir:{out}", pretrained=True).state_dict()
    tiny.assert_same(found, tensors)


def test_open_clip_weights_beside_a_foreign_configuration_keep_their_name(tmp_path: Path) -> None:
    """What was read says whose the folder is, not that there is some config.json."""
    tensors = dict(tiny.open_clip_model().state_dict())
    base = base_of(tmp_path / "base", "open_clip_model.safetensors", tensors, config={}, open_clip_config={})
    _, out = merged_into(tmp_path / "out", base, max_shard_size=1000)
    assert weights_in(out) == {"open_clip_model.safetensors"}
    assert "`open_clip.create_model_and_transforms('local-dir:' + folder)`" in card_of(out)


@pytest.mark.parametrize(
    ("files", "library", "call"),
    [
        ({"config": {"model_type": "clip"}}, "transformers", "`AutoModel.from_pretrained(folder)`"),
        ({"config": {}}, None, None),
        ({}, None, None),
        ({"config": {"hidden": 3}}, None, None),
        (
            {"config": {"model_type": "bert"}, "modules": [{"path": ""}]},
            "sentence-transformers",
            "`sentence_transformers.SentenceTransformer(folder)`",
        ),
        (
            {"modules": [], "config_sentence_transformers": {"model_type": "SparseEncoder"}},
            "sentence-transformers",
            "`sentence_transformers.SparseEncoder(folder)`",
        ),
        (
            {"modules": [], "config_sentence_transformers": {"model_type": "ColBERT"}},
            "PyLate",
            "`pylate.models.ColBERT(folder)`",
        ),
        ({"modules": [], "config_setfit": {}}, "setfit", "`setfit.SetFitModel.from_pretrained(folder)`"),
    ],
)
def test_the_card_names_the_loader_or_none(files: Any, library: str | None, call: str | None, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "model.safetensors", tower(), **files)
    _, out = merged_into(tmp_path / "out", base)
    card = card_of(out)
    assert ("library_name: " + str(library) in card) == (library is not None)
    assert (" loads it" in card) == (call is not None)
    assert call is None or call in card


@pytest.mark.parametrize("copy_code", [True, False])
def test_the_card_says_what_a_model_with_its_own_code_needs(copy_code: bool, tmp_path: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoModel": "modeling_mine.Mine"}}
    base = base_of(tmp_path / "base", "model.safetensors", tower(), config=config)
    (base / "modeling_mine.py").write_text("")
    _, out = merged_into(tmp_path / "out", base, copy_code=copy_code)
    assert ("trust_remote_code=True)` loads it" in card_of(out)) == copy_code
    assert ("The model's own code is not here" in card_of(out)) != copy_code


# further weights, and what is left out


def files_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def everything(base: Path) -> Path:
    """A folder with all that people keep in one."""
    base_of(base, "model.safetensors", tower(), config={"model_type": "bert"})
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense", "3_Mine/deep")]
    (base / "modules.json").write_text(json.dumps(modules))
    heads = {
        "2_Dense/model.safetensors": 8,
        "4_Dense/pytorch_model.bin": 8,
        "3_Mine/deep/w.npz": 8,
        "head.safetensors": 8,
    }
    for name, size in heads.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            save_file({"linear.weight": torch.ones(size, size)}, base / name)
        else:
            (base / name).write_bytes(b"\x80weights")
    for name in ("model_head.pkl", "colbert_linear.pt", "sparse_linear.pt"):
        (base / name).write_bytes(b"\x80pickle")
    for name in (
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "3_Mine/deep/odd.xyz",
        "vocab.txt",
        "artifact.metadata",
    ):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text("{}")
    for name in (
        *OTHER_FORMS,
        *TRAINING,
        "checkpoint-5/model.safetensors",
        "onnx/model.onnx",
        "runs/a/b",
        "data/x.csv",
    ):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(b"x")
    whole = dict(tower())
    save_file(whole, base / "copy.safetensors")
    return base


def test_every_file_of_the_base_is_in_the_output_or_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Heads and layers behind the model byte for byte; never the unmerged weights, never a training's state."""
    base = everything(tmp_path / "base")
    with caplog.at_level(logging.WARNING):
        _, out = merged_into(tmp_path / "out", base)
    there, here = files_of(base), files_of(out)
    left = [*OTHER_FORMS, *TRAINING, "copy.safetensors", "checkpoint-5", "onnx", "runs", "data"]
    expected = {name for name in there if name.partition("/")[0] not in left}
    assert expected <= here.keys()
    assert not [name for name in here if name.partition("/")[0] in left]
    assert all(here[name] == there[name] for name in expected - {"model.safetensors"})
    for name in left:
        assert name in caplog.text
        assert name in card_of(out)
    for name in ("model_head.pkl", "colbert_linear.pt", "2_Dense/model.safetensors", "head.safetensors"):
        assert name in card_of(out)
    assert "a pickle among them can run code" in card_of(out)


def test_an_output_is_folded_into_again_with_all_its_parts(tmp_path: Path) -> None:
    """A file of the user's is carried over; a part that was deleted comes back."""
    base = everything(tmp_path / "base")
    _, out = merged_into(tmp_path / "out", base)
    (out / "2_Dense" / "model.safetensors").unlink()
    (out / "mine.txt").write_text("x")
    again = ContinualMerger.load(out, base)
    again.fold(tuned(tower(), 2), "b")
    again.save(out)
    assert (out / "2_Dense" / "model.safetensors").read_bytes() == (base / "2_Dense" / "model.safetensors").read_bytes()
    assert (out / "mine.txt").exists()


def test_a_link_to_nowhere_inside_of_a_part_is_named(tmp_path: Path) -> None:
    base = everything(tmp_path / "base")
    (base / "2_Dense" / "model.safetensors").unlink()
    (base / "2_Dense" / "model.safetensors").symlink_to("../../gone")
    with pytest.raises(ValueError, match=r"2_Dense/model\.safetensors is a link to a file that is gone"):
        merged_into(tmp_path / "out", base)
    assert not (tmp_path / "out").exists()


def test_code_inside_of_a_part_is_copied_when_it_is_asked_for(tmp_path: Path) -> None:
    base = everything(tmp_path / "base")
    (base / "3_Mine" / "deep" / "mine.py").write_text("raise SystemExit('it was run')")
    assert any("3_Mine/deep/mine.py" in note for note in output_notes(open_checkpoint(base)))
    for asked in (False, True):
        _, out = merged_into(tmp_path / str(asked), base, copy_code=asked)
        assert (out / "3_Mine" / "deep" / "mine.py").exists() == asked


# outputs of the previous version, in which all weights were called ``model``


def as_written_before(out: Path) -> None:
    """Give an output the names that the previous version gave it."""
    state = json.loads((out / STATE_FILE).read_text())
    (out / "diffusion_pytorch_model.safetensors").rename(out / "model.safetensors")
    state["files"] = ["model.safetensors" if "diffusion" in name else name for name in state["files"]]
    (out / STATE_FILE).write_text(json.dumps(state))


@pytest.mark.parametrize("listed", [True, False])
def test_an_earlier_output_is_continued_under_the_right_name(listed: bool, tmp_path: Path) -> None:
    """With the masters, so with the same bits; the file under the old name would be read in place of the new one."""
    base = base_of(tmp_path / "base", "diffusion_pytorch_model.safetensors", DIT, config=DIFFUSERS)
    _, out = merged_into(tmp_path / "out", base, ["*to_?.weight"])
    as_written_before(out)
    if not listed:
        state = json.loads((out / STATE_FILE).read_text())
        (out / STATE_FILE).write_text(json.dumps({key: value for key, value in state.items() if key != "files"}))
    again = ContinualMerger.load(out, base, layers=["*to_?.weight"])
    again.fold(tuned(dict(open_checkpoint(base)), 2), "b")
    again.save(out)
    straight = ContinualMerger(base, tiny.fast_method(), layers=["*to_?.weight"])
    for seed, task in ((1, "a"), (2, "b")):
        straight.fold(tuned(dict(open_checkpoint(base)), seed), task)
    assert weights_in(out) == {"diffusion_pytorch_model.safetensors"}
    assert (out / MASTER_FILE).exists()
    tiny.assert_same(load_file(out / "diffusion_pytorch_model.safetensors"), straight.merged)
    files = json.loads((out / STATE_FILE).read_text())["files"]
    assert "diffusion_pytorch_model.safetensors" in files
    assert "model.safetensors" not in files


def test_an_output_of_any_name_is_a_base_again(tmp_path: Path) -> None:
    """Beside its masters, which are weights of a file, too."""
    for number, (file, tensors) in enumerate(
        {
            "diffusion_pytorch_model.safetensors": DIT,
            "consolidated.safetensors": MISTRAL,
            "odd.safetensors": DIT,
        }.items()
    ):
        base = base_of(tmp_path / f"base{number}", file, tensors)
        merged, out = merged_into(tmp_path / f"out{number}", base, ["*.weight"])
        tiny.assert_same(dict(open_checkpoint(out)), merged)
        second = ContinualMerger(out, tiny.fast_method(), layers=["*.weight"])
        second.fold(tuned(merged, 3), "again")
        assert weights_in(second.save(tmp_path / f"again{number}")) == weights_in(out)
