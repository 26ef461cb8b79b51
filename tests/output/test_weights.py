"""Weights on disk: streamed, in shards, and read by the libraries they are meant for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from folders import clip_folder, loading_info
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import Tensors, assert_same, folded, fresh, tower, tuned
from torch import nn

from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.output.files import MASTER_FILE
from safemerge_pl.output.weights import TensorSpec, write_weights


def every_dtype() -> Tensors:
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    tensors = {str(kind): tiny.randn(3, 5).mul(50).to(kind) for kind in (*kinds, torch.int8, torch.uint8)}
    tensors |= {"bool": torch.tensor([True, False, True]), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    return tensors | {'odd "name" ä/ü': torch.ones(7, dtype=torch.float16), "strided": tiny.randn(4, 6).T}


def write(folder: Path, tensors: Tensors, size: int | str) -> None:
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_weights(folder, "model", specs, tensors.__getitem__, size)


@pytest.mark.parametrize("size", [1, 100, "5GB"])
def test_what_is_written_is_what_the_library_reads(size: int | str, tmp_path: Path) -> None:
    """Every dtype, scalars, empty and strided tensors; aligned, with the format's name."""
    tensors = every_dtype()
    write(tmp_path, tensors, size)
    read: Tensors = {}
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
        read |= load_file(file)
    assert_same(read, {name: tensor.contiguous() for name, tensor in tensors.items()})


def test_a_file_has_the_size_of_the_librarys_own(tmp_path: Path) -> None:
    write(tmp_path, tower(), "5GB")
    save_file(tower(), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours, theirs = ((tmp_path / f"{name}.safetensors").stat().st_size for name in ("model", "theirs"))
    assert abs(ours - theirs) < 8


def test_shards_keep_their_size_and_the_index_is_complete(tmp_path: Path) -> None:
    """As transformers numbers them; only a tensor that is larger on its own exceeds the size."""
    tensors = tower()
    write(tmp_path, tensors, 700)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert files == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    for file in files:
        names = [name for name, place in index["weight_map"].items() if place == file]
        assert sorted(load_file(tmp_path / file)) == sorted(names)
        assert sum(sizes[name] for name in names) <= 700 or len(names) == 1
    assert_same(dict(open_checkpoint(tmp_path)), tensors)


@pytest.mark.parametrize("size", ["5 bananas", "", 0, -1, "0GB", "infGB", "nan", "GB"])
def test_a_size_that_is_none_is_refused_before_anything_is_written(size: int | str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="`max_shard_size` must be"):
        folded(1).save(tmp_path / "out", max_shard_size=size)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"`z` is torch\.complex64, which cannot be written"):
        write(tmp_path, {"z": torch.zeros(2, dtype=torch.complex64)}, "5GB")


def test_no_shard_of_an_earlier_output_survives(tmp_path: Path) -> None:
    """Many shards, one file, fewer shards; also where the list of the earlier merge's own files was lost."""
    out = tmp_path / "out"
    merger = folded(1)
    for size in (300, "5GB", 2000, 700, "5GB"):
        merger.save(out, max_shard_size=size)
        state = json.loads((out / "merge_state.json").read_text())
        (out / "merge_state.json").write_text(json.dumps(state | {"files": []}))
        read: Tensors = {}
        for file in out.glob("model*.safetensors"):
            read |= load_file(file)
        assert (out / "model.safetensors").exists() == (size == "5GB") == (not list(out.glob("model*.index.json")))
        assert_same(read, merger.merged)
        again = ContinualMerger.load(out, tower())
        assert again.fingerprint() == merger.fingerprint()
    assert sorted(path.name for path in out.glob("merge_master*")) == [MASTER_FILE]


def saved(model: nn.Module, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def models() -> dict[str, Any]:
    return {
        "clip": tiny.hf_clip,
        "vision": tiny.hf_vision_model,
        "t5": tiny.hf_t5,
        "gpt2": tiny.hf_gpt2,
        "llama": tiny.hf_llama,
    }


@pytest.mark.parametrize("size", [900, "5GB"])
@pytest.mark.parametrize("kind", list(models()))
def test_the_library_loads_the_output_whole(kind: str, size: int | str, tmp_path: Path) -> None:
    """No missing and no unexpected key; tied tensors once where the base has them once."""
    model = models()[kind]()
    base = saved(model, tmp_path / "base")
    merger = fresh(base)
    merger.fold(tuned(model.state_dict(), 1), "a")
    out = merger.save(tmp_path / "out", max_shard_size=size)
    assert (len(list(out.glob("model-*"))) > 1) == (size != "5GB")
    assert sorted(open_checkpoint(out)) == sorted(open_checkpoint(base))
    loaded, info = loading_info(type(model), out)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    state = loaded.state_dict()
    for name, tensor in merger.merged.items():
        bare = name if name in state else name.removeprefix("vision_model.")
        assert torch.equal(state[bare], tensor), name
    config, original = (json.loads((place / "config.json").read_text()) for place in (out, base))
    assert config == original
    again = ContinualMerger.load(out, base)
    assert again.fingerprint() == merger.fingerprint()


@pytest.mark.parametrize("size", [900, "5GB"])
def test_an_untied_t5_answers_as_the_merged_weights_do(size: int | str, tmp_path: Path) -> None:
    """The head of its own stays; read as tied, the output would lose it and scale its logits."""
    base = saved(tiny.hf_t5(), tmp_path / "base")
    head = {"lm_head.weight": tiny.randn(16, 8, seed=7)}
    save_file(load_file(base / "model.safetensors") | head, base / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    del config["scale_decoder_outputs"]
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))  # as the published files
    model, _ = loading_info(type(tiny.hf_t5()), base)
    assert not torch.equal(model.lm_head.weight, model.shared.weight)
    merger = fresh(base)
    merger.fold(tuned(model.state_dict(), 1), "a")
    out = merger.save(tmp_path / "out", max_shard_size=size)
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()
    loaded, info = loading_info(type(model), out)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(loaded.lm_head.weight, head["lm_head.weight"])
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        before = model(input_ids=tokens, decoder_input_ids=tokens).logits
        model.load_state_dict(merger.merged, strict=False)
        ours, theirs = (m.eval()(input_ids=tokens, decoder_input_ids=tokens).logits for m in (model, loaded))
    assert torch.equal(theirs, ours)
    assert not torch.equal(before, ours)


def open_clip_folder(path: Path) -> Path:
    """As open_clip pushes a model to the hub."""
    model = tiny.open_clip_model()
    vision = {"layers": 2, "width": 8, "head_width": 4, "mlp_ratio": 2.0, "patch_size": 4, "image_size": 8}
    text = {"context_length": 8, "vocab_size": 16, "width": 8, "heads": 2, "layers": 1}
    config = {"model_cfg": {"embed_dim": 8, "vision_cfg": vision, "text_cfg": text, "quick_gelu": True}}
    path.mkdir()
    save_file(model.state_dict(), path / "open_clip_model.safetensors")
    (path / "open_clip_config.json").write_text(json.dumps(config | {"preprocess_cfg": {"mean": [0.5, 0.5, 0.5]}}))
    return path


def test_open_clip_loads_the_output(tmp_path: Path) -> None:
    """By file and by folder, offline; one file under the library's own name, since it reads no shards."""
    import open_clip

    base = open_clip_folder(tmp_path / "base")
    model = tiny.open_clip_model()
    merger = fresh(base)
    merger.fold(tuned(model.state_dict(), 1), "a")
    out = merger.save(tmp_path / "out", max_shard_size=900)
    assert [path.name for path in out.glob("*model*")] == ["open_clip_model.safetensors"]
    assert (out / "open_clip_config.json").read_bytes() == (base / "open_clip_config.json").read_bytes()
    problems = open_clip.load_checkpoint(model, str(out / "open_clip_model.safetensors"))
    assert not problems.missing_keys
    assert not problems.unexpected_keys
    assert_same(model.state_dict(), merger.merged)
    whole = open_clip.create_model(f"local-dir:{out}")
    assert_same(whole.state_dict(), merger.merged)
    assert ContinualMerger.load(out, base).fingerprint() == merger.fingerprint()


def test_a_full_clip_in_shards_serves_the_vision_model_too(tmp_path: Path) -> None:
    from transformers import CLIPVisionModel

    base = clip_folder(tmp_path / "base")
    merger = fresh(base)
    merger.fold(tuned(tiny.hf_clip().state_dict(), 1), "a")
    out = merger.save(tmp_path / "out", max_shard_size=500, dtype="bfloat16")
    model, info = loading_info(CLIPVisionModel, out)
    assert not info["missing_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("size", ["10MB", "5GB"])
def test_one_tensor_at_a_time_is_in_memory(size: str, tmp_path: Path) -> None:
    """Writing 128 MB beside the merged parameters takes a few tensors of 4 MB."""
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)]
    names += [f"model.layers.{i}.mlp.down_proj.weight" for i in range(30)]
    tiny.folder_of(tmp_path / "base", {name: torch.zeros(1024, 1024) for name in names}, config={"model_type": "llama"})
    script = """
import resource, sys
import torch
from huggingface_hub import ModelCardData, split_state_dict_into_shards_factory
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import TaskArithmetic
merger = ContinualMerger(sys.argv[1], TaskArithmetic(), layers=["*.up_proj.weight"])
merger.fold(sys.argv[1], "same")
merger.save(sys.argv[2] + "/first", max_shard_size="1GB", dtype="bfloat16")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merger.save(sys.argv[2] + "/out", max_shard_size=sys.argv[3])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    args = [sys.executable, "-c", script, str(tmp_path / "base"), str(tmp_path), size]
    run = subprocess.run(args, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 24
    assert len(list((tmp_path / "out").glob("model*.safetensors"))) == (16 if size == "10MB" else 1)
