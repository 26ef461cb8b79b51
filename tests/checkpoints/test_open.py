"""Opening checkpoints of every kind, matching names, and refusing what is broken, foreign or dangerous."""

import argparse
import json
import pickle
import random
import re
import struct
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from safetensors.torch import save_file
from tiny import Tensors
from torch import Tensor, nn

from safemerge_pl.checkpoints import Checkpoint, CheckpointError, fingerprint, match_names, open_checkpoint
from safemerge_pl.merger import ContinualMerger


def weights() -> Tensors:
    """Every dtype that a model holds, a scalar, and a matrix that is not contiguous in memory."""
    return {
        "layer.weight": tiny.randn(4, 3),
        "layer.fp16": tiny.randn(2, 2, seed=1).half(),
        "layer.bf16": tiny.randn(3, seed=2).bfloat16(),
        "logit_scale": torch.tensor(2.5),
        "position_ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
    }


def shards(folder: Path, tensors: Tensors, suffix: str, save: Callable[[Tensors, Path], Any]) -> Path:
    """Two shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    names = list(tensors)
    where = {name: f"{stem}-0000{1 + i % 2}-of-00002.{suffix}" for i, name in enumerate(names)}
    for file in set(where.values()):
        save({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def as_module(tensors: Tensors, tmp_path: Path) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        owner = module
        for part in name.split(".")[:-1]:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_buffer(name.split(".")[-1], tensor)
    return module


def as_mapping(tensors: Tensors, tmp_path: Path) -> Tensors:
    return tensors


def as_nested_mapping(tensors: Tensors, tmp_path: Path) -> dict[str, Any]:
    return {"state_dict": tensors, "epoch": 3}


def as_safetensors(tensors: Tensors, tmp_path: Path) -> Path:
    save_file(tensors, tmp_path / "any name.safetensors", metadata={"format": "pt"})
    return tmp_path / "any name.safetensors"


def as_folder(tensors: Tensors, tmp_path: Path) -> Path:
    return tiny.folder_of(tmp_path / "model", tensors, config={})


def as_folder_text(tensors: Tensors, tmp_path: Path) -> str:
    return str(as_folder(tensors, tmp_path))


def as_open_clip_folder(tensors: Tensors, tmp_path: Path) -> Path:
    save_file(tensors, tmp_path / "open_clip_model.safetensors")
    return tmp_path


def as_lone_file_in_folder(tensors: Tensors, tmp_path: Path) -> Path:
    save_file(tensors, tmp_path / "finetuned.safetensors")
    return tmp_path


def as_shards(tensors: Tensors, tmp_path: Path) -> Path:
    return shards(tmp_path / "sharded", tensors, "safetensors", save_file)


def as_bin(tensors: Tensors, tmp_path: Path) -> Path:
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    return tmp_path


def as_open_clip_bin(tensors: Tensors, tmp_path: Path) -> Path:
    torch.save(tensors, tmp_path / "open_clip_pytorch_model.bin")
    return tmp_path


def as_bin_shards(tensors: Tensors, tmp_path: Path) -> Path:
    return shards(tmp_path / "sharded", tensors, "bin", torch.save)


def as_pt(tensors: Tensors, tmp_path: Path) -> Path:
    torch.save(tensors, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def as_old_pt(tensors: Tensors, tmp_path: Path) -> Path:
    torch.save(tensors, tmp_path / "model.pth", _use_new_zipfile_serialization=False)
    return tmp_path / "model.pth"


def as_ckpt(tensors: Tensors, tmp_path: Path) -> Path:
    """As Lightning writes it, with an optimiser whose tensors must not be taken for weights."""
    content = {
        "epoch": 3,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": tensors,
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(4, 3)}}}],
        "hyper_parameters": {"lr": 1e-3},
    }
    torch.save(content, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def as_training_dict(tensors: Tensors, tmp_path: Path) -> Path:
    torch.save({"model": tensors, "optimizer": {"state": {}}, "step": torch.tensor(5)}, tmp_path / "step.pt")
    return tmp_path / "step.pt"


SOURCES = [
    as_module,
    as_mapping,
    as_nested_mapping,
    as_safetensors,
    as_folder,
    as_folder_text,
    as_open_clip_folder,
    as_lone_file_in_folder,
    as_shards,
    as_bin,
    as_open_clip_bin,
    as_bin_shards,
    as_pt,
    as_old_pt,
    as_ckpt,
    as_training_dict,
]
IN_FOLDERS = {as_folder, as_folder_text, as_open_clip_folder, as_lone_file_in_folder, as_shards, as_bin}
IN_FOLDERS |= {as_open_clip_bin, as_bin_shards}


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__[3:])
def test_every_kind_of_source_gives_the_same_tensors(make: Callable[[Tensors, Path], Any], tmp_path: Path) -> None:
    tensors = weights()
    source = make(tensors, tmp_path)
    checkpoint = open_checkpoint(source)
    assert sorted(checkpoint) == sorted(tensors)
    assert len(checkpoint) == len(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == checkpoint[name].dtype == tensor.dtype
        assert torch.equal(checkpoint[name], tensor)
    assert checkpoint.shapes() == {name: tuple(tensors[name].shape) for name in checkpoint}
    assert (checkpoint.folder is not None) == (make in IN_FOLDERS)
    if isinstance(source, (str, Path)):
        assert checkpoint.source == str(source)
    assert open_checkpoint(checkpoint) is checkpoint


def test_shapes_and_dtypes_come_from_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(as_shards(tiny.tower(), tmp_path))
    tiny.refuse_to_read(monkeypatch)
    wanted = [f"vision_model.{name}" for name in tiny.only_weights(tiny.tower())]
    for name in match_names(wanted, checkpoint).values():
        assert len(checkpoint.shape(name)) == 2
        assert checkpoint.dtype(name) == torch.float32
    with pytest.raises(AssertionError, match="a tensor was read"):
        checkpoint[tiny.only_weights(tiny.tower())[0]]


@pytest.mark.parametrize("make", [as_shards, as_safetensors, as_folder])
def test_opening_and_asking_for_a_name_reads_headers_only(
    make: Callable[[Tensors, Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(weights(), tmp_path)
    tiny.refuse_to_read(monkeypatch)
    checkpoint = open_checkpoint(source)
    assert "layer.weight" in checkpoint
    assert "layer.bias" not in checkpoint
    assert {"layer.weight", "mask"} <= checkpoint.keys()


def test_reading_one_tensor_opens_its_shard_only(tmp_path: Path) -> None:
    folder = as_shards(weights(), tmp_path)
    checkpoint = open_checkpoint(folder)
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    (folder / where["layer.fp16"]).unlink()
    assert torch.equal(checkpoint["layer.weight"], weights()["layer.weight"])


# names


def bare() -> tuple[list[str], Tensors]:
    tensors = tiny.tower()
    return tiny.only_weights(tensors), tensors


WRAPPERS = {
    "plain": lambda name: name,
    "DDP": lambda name: f"module.{name}",
    "compile": lambda name: f"_orig_mod.{name}",
    "compiled submodule": lambda name: name.replace("encoder.", "encoder._orig_mod."),
    "compiled layer": lambda name: re.sub(r"layers\.(\d+)\.", r"layers.\1._orig_mod.", name),
    "legacy": lambda name: f"vision_model.{name}",
    "stacked": lambda name: f"model.module._orig_mod.vision_model.{name}",
    "stacked otherwise": lambda name: f"_orig_mod.module.model._orig_mod.{name}",
    "Lightning": lambda name: f"model.{name}",
    "task vectors": lambda name: f"image_encoder.model.visual.{name}",
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("own", ["plain", "legacy", "DDP"])
def test_wrappers_around_either_side_do_not_matter(wrapper: str, own: str) -> None:
    wanted, tensors = bare()
    incoming = open_checkpoint({WRAPPERS[wrapper](name): tensor for name, tensor in tensors.items()})
    found = match_names([WRAPPERS[own](name) for name in wanted], incoming)
    assert found == {WRAPPERS[own](name): WRAPPERS[wrapper](name) for name in wanted}


def test_the_tower_is_found_inside_a_two_tower_model() -> None:
    """The text tower has the same names below its prefix."""
    incoming = open_checkpoint(tiny.hf_clip())
    wanted, _ = bare()
    assert set(match_names(wanted, incoming).values()) == {f"vision_model.{name}" for name in wanted}


def test_an_image_encoder_of_the_task_vector_scripts_is_found() -> None:
    """With a real open_clip model below its chain of attributes, text tower present."""
    model = tiny.open_clip_model()
    wrapper = nn.Module()
    wrapper.model = model
    tensors = {f"image_encoder.{name}": tensor for name, tensor in wrapper.state_dict().items()}
    wanted = [name for name in model.state_dict() if name.startswith("visual.") and "resblocks" in name]
    found = match_names(wanted, open_checkpoint(tensors))
    assert found == {name: f"image_encoder.model.{name}" for name in wanted}


def test_a_real_compiled_and_wrapped_module_is_found(tmp_path: Path) -> None:
    """Names as torch itself writes them."""
    compiled = torch.compile(tiny.hf_vision())
    wrapper = nn.Module()
    wrapper.module = compiled
    torch.save(wrapper.state_dict(), tmp_path / "model.pt")
    wanted, _ = bare()
    found = match_names(wanted, open_checkpoint(tmp_path / "model.pt"))
    assert found == {name: f"module._orig_mod.{name}" for name in wanted}


def test_a_name_that_comes_with_and_without_wrapper_is_refused() -> None:
    wanted, tensors = bare()
    twice = tensors | {f"module.{wanted[0]}": tensors[wanted[0]] + 1}
    with pytest.raises(CheckpointError) as caught:
        match_names(wanted, open_checkpoint(twice))
    assert f"`{wanted[0]}`" in str(caught.value)
    assert f"`module.{wanted[0]}`" in str(caught.value)


def test_a_file_that_holds_the_model_twice_is_refused() -> None:
    """Student and teacher, or raw and averaged weights, side by side."""
    wanted, tensors = bare()
    twice = tiny.renamed(tensors, "", "student.") | tiny.renamed(tensors, "", "teacher.")
    with pytest.raises(CheckpointError, match=r"twice.*student\..*teacher\."):
        match_names(wanted, open_checkpoint(twice))


@pytest.mark.parametrize("names", [("model", "model_ema"), ("state_dict", "state_dict_ema")])
def test_raw_and_averaged_weights_in_one_file_are_not_chosen_silently(names: tuple[str, str], tmp_path: Path) -> None:
    torch.save({name: tiny.tuned(weights(), seed) for seed, name in enumerate(names)}, tmp_path / "both.pt")
    with pytest.raises(CheckpointError, match=names[1]):
        open_checkpoint(tmp_path / "both.pt")


def test_equal_names_are_matched_even_if_only_one_layer_is_wanted() -> None:
    """Another layer of the same shape is no second copy of the model."""
    _, tensors = bare()
    name = "encoder.layers.0.self_attn.q_proj.weight"
    assert match_names([name], open_checkpoint(tensors)) == {name: name}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_layers_of_one_block_are_matched_with_that_block(wrapper: str) -> None:
    wanted, tensors = bare()
    first = [name for name in wanted if ".0." in name]
    incoming = open_checkpoint({WRAPPERS[wrapper](name): tensor for name, tensor in tensors.items()})
    assert match_names(first, incoming) == {name: WRAPPERS[wrapper](name) for name in first}


def test_the_encoder_of_t5_is_not_taken_for_its_decoder() -> None:
    tensors = tiny.hf_t5().state_dict()
    wanted = [name for name in tensors if re.match(r"encoder\.block\.0.*SelfAttention\.[qkvo]", name)]
    assert match_names(wanted, open_checkpoint(tensors)) == {name: name for name in wanted}


def test_a_block_is_not_taken_for_another() -> None:
    """One block is wanted, and the file holds only the other."""
    wanted, tensors = bare()
    incoming = open_checkpoint({name: tensor for name, tensor in tensors.items() if ".1." in name})
    with pytest.raises(CheckpointError, match="lacks 5 of 5"):
        match_names([name for name in wanted if ".0." in name], incoming)


def test_a_decoder_is_not_taken_for_an_encoder() -> None:
    tensors = tiny.hf_t5().state_dict()
    wanted = [name for name in tensors if re.match(r"encoder\.block\.0.*SelfAttention\.[qkvo]", name)]
    incoming = open_checkpoint({name: tensor for name, tensor in tensors.items() if name.startswith("decoder.")})
    with pytest.raises(CheckpointError, match="lacks 4 of 4"):
        match_names(wanted, incoming)


def test_a_partial_match_is_refused_with_the_first_missing_tensor() -> None:
    wanted, tensors = bare()
    partial = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    first = next(name for name in wanted if "layers.1." in name)
    with pytest.raises(CheckpointError, match=rf"lacks 5 of 10 tensors to merge, first `{re.escape(first)}`"):
        match_names(wanted, open_checkpoint(partial))


def test_another_model_is_refused_with_an_example_of_its_names() -> None:
    """No match at all is an error, always."""
    wanted, _ = bare()
    with pytest.raises(CheckpointError, match=r"lacks 10 of 10 .*it has, for example, `backbone\.stem\.weight`"):
        match_names(wanted, open_checkpoint({"backbone.stem.weight": torch.zeros(2, 2)}))


def test_prefixes_are_not_mixed_within_one_match() -> None:
    """Half of the layers under one prefix and half under another is no model."""
    wanted, tensors = bare()
    mixed = {("left." if "layers.0." in name else "right.") + name: tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match="lacks 5 of 10"):
        match_names(wanted, open_checkpoint(mixed))


# broken and foreign files


LFS = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:"
    + b"4d7a214614ab2935c943f9e0ff69d22e" * 2
    + b"\nsize 1234\n"
)
HTML = b"<!DOCTYPE html>\n<html><head><title>404</title></head><body>not found</body></html>\n"


def in_folder(tmp_path: Path, name: str, content: bytes) -> Path:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_git_lfs_pointer_is_recognised(name: str, tmp_path: Path) -> None:
    folder = in_folder(tmp_path, name, LFS)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}.*git-lfs pointer of {len(LFS)} bytes.*git lfs pull"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [HTML, HTML * 40, b"", b"\0", b"GGUF\x03\0\0\0" + bytes(60)], ids=repr)
def test_no_weights_under_the_name_of_weights(name: str, content: bytes, tmp_path: Path) -> None:
    """A web page, an empty file, another format; the file is named."""
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "broken" / name))):
        open_checkpoint(in_folder(tmp_path, name, content))


@pytest.mark.parametrize("cut", [1, 10, 400])
def test_a_file_cut_short_is_refused_before_anything_is_read(cut: int, tmp_path: Path) -> None:
    content = save_bytes(weights(), {"format": "pt"})
    folder = in_folder(tmp_path, "model.safetensors", content[:-cut])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors \({len(content) - cut} bytes\) is (truncated|no)"):
        open_checkpoint(folder)


def test_a_file_with_trailing_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(in_folder(tmp_path, "model.safetensors", save_bytes(weights()) + bytes(10)))


@pytest.mark.parametrize("cut", [1, 10, 400])
def test_a_pickle_cut_short_is_refused(cut: int, tmp_path: Path) -> None:
    path = as_pt(weights(), tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        open_checkpoint(path)


def test_missing_shards_are_listed_at_once(tmp_path: Path) -> None:
    folder = as_shards(weights(), tmp_path)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "2 of 2 shards" in str(caught.value)
    assert "model-00001-of-00002.safetensors" in str(caught.value)
    assert "model-00002-of-00002.safetensors" in str(caught.value)


def test_an_index_that_promises_a_tensor_no_shard_holds_is_refused(tmp_path: Path) -> None:
    """Whoever loads the merged folder would get random values there."""
    folder = as_shards(weights(), tmp_path)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["head.weight"] = content["weight_map"]["layer.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        open_checkpoint(folder)


def test_a_tensor_that_the_index_forgot_is_not_lost(tmp_path: Path) -> None:
    folder = as_shards(weights(), tmp_path)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["layer.fp16"]
    index.write_text(json.dumps(content))
    assert torch.equal(open_checkpoint(folder)["layer.fp16"], weights()["layer.fp16"])


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = as_shards(weights(), tmp_path)
    other = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["layer.fp16"]
    save_file({"layer.weight": torch.zeros(4, 3)}, folder / other)
    with pytest.raises(CheckpointError, match=r"layer\.weight.*also stands in"):
        open_checkpoint(folder)


@pytest.mark.parametrize("target", ["../secret.safetensors", "{outside}", "sub/../../secret.safetensors"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_cannot_reach_out_of_its_folder(target: str, kind: str, tmp_path: Path) -> None:
    folder = as_shards(weights(), tmp_path) if kind == "safetensors" else as_bin_shards(weights(), tmp_path)
    save_file(weights(), tmp_path / "secret.safetensors")
    target = target.format(outside=tmp_path / "secret.safetensors")
    index = next(folder.glob("*.index.json"))
    index.write_text(json.dumps({"weight_map": {"layer.weight": target}}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", "null", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": null, "b": ""}}'],
)
def test_a_broken_index_is_named(content: str, tmp_path: Path) -> None:
    folder = in_folder(tmp_path, "model.safetensors.index.json", content.encode())
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(folder)


def test_metadata_is_not_needed(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    assert sorted(open_checkpoint(tmp_path)) == sorted(weights())


def test_safetensors_win_over_a_pickle_beside_them(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path)["x"].item() == 0


def test_the_symlinks_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    """Blobs have no extension; the link's name tells the format."""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    save_file(weights(), tmp_path / "blobs" / "0a1b2c")
    torch.save(weights(), tmp_path / "blobs" / "3d4e5f")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a1b2c")
    (snapshot / "model.bin").symlink_to("../../blobs/3d4e5f")
    (tmp_path / "link").symlink_to(snapshot)
    for source in (snapshot, snapshot / "model.safetensors", snapshot / "model.bin", tmp_path / "link"):
        checkpoint = open_checkpoint(source)
        assert torch.equal(checkpoint["layer.weight"], weights()["layer.weight"])


@pytest.mark.parametrize("name", ["a+b@c d", "owner@main", "ünï", "100%"])
def test_a_path_is_taken_as_it_is(name: str, tmp_path: Path) -> None:
    folder = tiny.folder_of(tmp_path / name, weights())
    assert sorted(open_checkpoint(str(folder))) == sorted(weights())


def never(*args: object, **kwargs: object) -> None:
    raise AssertionError("the hub was asked")


def test_a_local_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.folder_of(tmp_path / "owner" / "name", weights())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    assert sorted(open_checkpoint("owner/name")) == sorted(weights())


@pytest.mark.parametrize(
    "source", ["/no/such/folder", "./here", "../up", "one", "a/b/c", r"C:\models\x", "~/nowhere-x"]
)
def test_a_missing_path_is_refused_without_asking_the_hub(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(source)


@pytest.mark.parametrize("source", ["runs/merged.safetensors", "out/last.ckpt"])
def test_a_missing_file_with_the_ending_of_weights_is_no_hub_id(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    with pytest.raises(CheckpointError, match=re.escape(source)):
        open_checkpoint(source)


def test_a_folder_without_weights_says_what_it_expected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds no weights: expected one of .*model\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_folder_with_several_loose_files_is_not_guessed(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "a.safetensors")
    save_file(weights(), tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tmp_path)


def test_an_adapter_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Never merged as if it were weights."""
    save_file({"base_model.model.q.lora_A.weight": torch.zeros(2, 4)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"PEFT adapter.*merge_and_unload"):
        open_checkpoint(tmp_path)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.zip").write_bytes(b"zip")
    with pytest.raises(CheckpointError, match=r"model\.zip is not a checkpoint: expected \.safetensors"):
        open_checkpoint(tmp_path / "model.zip")


def test_a_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(60))
    with pytest.raises(CheckpointError, match=r"model\.gguf.*GGUF.*float32, bfloat16 or float16"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("content", [{}, {"lr": 0.1}, {"state_dict": {"a": 1}}])
def test_a_mapping_without_tensors_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="holds no tensors by name"):
        open_checkpoint(content)


def test_a_list_of_tensors_is_refused(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt holds no tensors by name"):
        open_checkpoint(tmp_path / "model.pt")


def test_an_eight_bit_float_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shape("x") == (2, 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor `x` is stored as F8_E4M3.*float32"):
        checkpoint.dtype("x")


# pickles


class Touch:
    """Unpickles by creating a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["model.pt", "model.ckpt", "model.pth", "pytorch_model.bin"])
@pytest.mark.parametrize("how", ["torch", "torch, old format", "plain pickle"])
def test_code_in_a_pickle_does_not_run(name: str, how: str, tmp_path: Path) -> None:
    mark = tmp_path / "the code ran"
    content = {"state_dict": weights(), "callbacks": Touch(mark)}
    path = tmp_path / name
    if how == "plain pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "torch")
    with pytest.raises(CheckpointError, match=r"cannot be read as plain tensors.*safetensors"):
        open_checkpoint(path)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)  # as a folder, where its name is one that is looked for
    assert not mark.exists()
    torch.load(path, weights_only=False) if how != "plain pickle" else pickle.loads(path.read_bytes())
    assert mark.exists()  # the file was dangerous


def test_a_namespace_is_refused_in_a_sentence_that_names_it(tmp_path: Path) -> None:
    torch.save({"state_dict": weights(), "args": argparse.Namespace(lr=1e-3)}, tmp_path / "old.pt")
    with pytest.raises(CheckpointError, match=r"old\.pt.*Namespace.*safetensors\.$") as caught:
        open_checkpoint(tmp_path / "old.pt")
    assert not re.search(r"\n|\x1b|weights_only=False", str(caught.value))


def test_a_whole_module_is_refused_and_its_code_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = types.ModuleType("throwaway_modeling")
    kind = type("ImageEncoder", (nn.Linear,), {"__module__": home.__name__})
    home.ImageEncoder = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    torch.save(kind(2, 2), tmp_path / "encoder.pt")
    monkeypatch.delitem(sys.modules, home.__name__)
    with pytest.raises(CheckpointError, match=r"encoder\.pt.*state dict.*safetensors") as caught:
        open_checkpoint(tmp_path / "encoder.pt")
    assert "No module named" not in str(caught.value)


def test_a_torchscript_archive_is_recognised(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt.*TorchScript"):
        open_checkpoint(tmp_path / "model.pt")


def test_a_file_from_another_device_opens_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage says cuda:0."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save(weights(), tmp_path / "gpu.pt")
    monkeypatch.undo()
    assert open_checkpoint(tmp_path / "gpu.pt")["layer.weight"].device.type == "cpu"


def test_a_checkpoint_that_lightning_wrote_opens(tmp_path: Path) -> None:
    import lightning as L

    class Wrapped(L.LightningModule):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = tiny.hf_vision()

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)
    module = Wrapped(lr=0.1)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "task.ckpt")
    checkpoint = open_checkpoint(tmp_path / "task.ckpt")
    wanted, _ = bare()
    found = match_names(wanted, checkpoint)
    assert found == {name: f"model.{name}" for name in wanted}
    assert torch.equal(checkpoint[found[wanted[0]]], module.state_dict()[found[wanted[0]]])


# fuzzing


def outcome(path: Path) -> Tensors | None:
    """What our reader makes of a file: all tensors, or ``None`` if it refuses; any other exception is a bug."""
    try:
        checkpoint: Checkpoint = open_checkpoint(path)
        tensors = {name: checkpoint[name] for name in checkpoint}
        described = {name: (checkpoint.shape(name), checkpoint.dtype(name)) for name in checkpoint}
    except CheckpointError as error:
        if str(path) not in str(error):
            raise LookupError(f"the file is not named: {error}") from error
        return None
    assert described == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return tensors


def bits(tensors: Tensors) -> dict[str, tuple[Any, ...]]:
    def raw(tensor: Tensor) -> bytes:
        return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())

    return {name: (tensor.dtype, tuple(tensor.shape), raw(tensor)) for name, tensor in tensors.items()}


def mutated(content: bytes, rng: random.Random, header: int) -> bytes:
    """A copy with one kind of damage; mostly in the header, where it hurts."""
    data = bytearray(content)
    kind = rng.randrange(6)
    spot = rng.randrange(8 + header) if rng.random() < 0.9 else rng.randrange(len(data))
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 1:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(8 + header)] = rng.randrange(256)
    elif kind == 2:
        data[spot] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del data[spot : spot + rng.randint(1, 4)]
    elif kind == 4:
        data[spot:spot] = rng.choice([b"0", b"-", b"9" * 30, b'"', b"{", b"null", b"\0", b",", b"\xff"])
    else:  # another digit in place of a digit: a header that is still JSON but lies
        digits = [i for i in range(8, 8 + header) if chr(data[i]).isdigit()]
        for i in rng.sample(digits, rng.randint(1, 2)):
            data[i] = ord(str(rng.randrange(10)))
    if kind in (3, 4) and rng.random() < 0.5:
        data[:8] = struct.pack("<Q", max(0, header + len(data) - len(content)))  # the length agrees with the change
    return bytes(data)


@pytest.mark.timeout(120)
def test_a_damaged_safetensors_file_is_refused_or_read_right(tmp_path: Path) -> None:
    """A few hundred random damages: ``CheckpointError``, or what the format's own reader gives."""
    content = save_bytes(weights(), {"format": "pt"})
    header = struct.unpack("<Q", content[:8])[0]
    rng, path = random.Random(0), tmp_path / "model.safetensors"
    wrong: list[str] = []
    refused = 0
    for trial in range(400):
        damaged = mutated(content, rng, header)
        path.write_bytes(damaged)
        try:
            found = outcome(path)
        except Exception as error:
            wrong.append(f"{trial}: {type(error).__name__}: {str(error)[:80]}")
            continue
        refused += found is None
        if found is not None:
            try:
                right = bits(load_bytes(damaged))
            except (SafetensorError, ValueError, KeyError):
                wrong.append(f"{trial}: read what the format's own reader refuses")
                continue
            if bits(found) != right:
                wrong.append(f"{trial}: read other values")
    assert not wrong, f"{len(wrong)} of 400: " + "; ".join(wrong[:5])
    assert 200 < refused < 400  # the damage was neither too mild nor always fatal


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


LIES: dict[str, Any] = {
    "a list": [1, 2],
    "a number": 5,
    "an entry that is none": {"x": 5},
    "no offsets": {"x": {"dtype": "F32", "shape": [2]}},
    "no shape": {"x": {"dtype": "F32", "data_offsets": [0, 8]}},
    "no dtype": {"x": {"shape": [2], "data_offsets": [0, 8]}},
    "a dtype that is none": entry(dtype=32),
    "an unknown dtype": entry(dtype="Z99"),
    "a shape that is none": entry(shape="2"),
    "a negative shape": entry(shape=[-2, -1]),
    "a shape that does not fit": entry(shape=[3]),
    "a huge shape": entry(shape=[2**40, 2**40]),
    "text offsets": entry(data_offsets=["0", "8"]),
    "mixed offsets": entry() | {"y": {"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]}},
    "broken offsets": entry(data_offsets=[0.5, 8]),
    "one offset": entry(data_offsets=[8]),
    "negative offsets": entry(data_offsets=[-8, 8]),
    "reversed offsets": {"x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}} | {"y": entry()["x"]},
    "offsets past the end": entry(data_offsets=[8, 16]),
    "overlapping tensors": entry() | {"y": entry()["x"]},
    "a hole": entry(data_offsets=[4, 8], shape=[1]),
    "metadata that is none": entry() | {"__metadata__": 5},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_or_read_right(lie: str, tmp_path: Path) -> None:
    header = json.dumps(LIES[lie]).encode()
    damaged = struct.pack("<Q", len(header)) + header + bytes(range(8))
    (tmp_path / "model.safetensors").write_bytes(damaged)
    found = outcome(tmp_path / "model.safetensors")
    assert found is None or bits(found) == bits(load_bytes(damaged))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_deeply_nested_header_is_refused(opening: bytes, tmp_path: Path) -> None:
    header = opening * 100_000
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert outcome(tmp_path / "model.safetensors") is None


def mutated_index(content: str, rng: random.Random) -> bytes:
    """Damage to a text that is mostly still JSON: names, quotes, nesting, encodings."""
    data = bytearray(content.encode())
    for _ in range(rng.randint(1, 3)):
        spot = rng.randrange(len(data))
        kind = rng.randrange(5)
        if kind == 0:
            data[spot] = rng.randrange(256)
        elif kind == 1:
            del data[spot : spot + rng.randint(1, 12)]
        elif kind == 2:
            extras = [
                b"[" * 20_000,
                b"\\u0000",
                b"\\ud800",
                b"../",
                b"/",
                b"a" * 300,
                b"null",
                b"{}",
                b"\xff",
                b"1",
                b'"',
            ]
            data[spot:spot] = rng.choice(extras)
        elif kind == 3:
            start = rng.randrange(len(data))
            data[spot:spot] = data[start : start + rng.randint(1, 40)]
        else:
            names = [match.start() for match in re.finditer(b"-of-", bytes(data))]
            data[rng.choice(names) - 1 if names else 0] = rng.randrange(48, 58)
    return bytes(data)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_damaged_index_is_refused_or_read_right(kind: str, tmp_path: Path) -> None:
    """``CheckpointError``, or tensors that are all there; never another error."""
    folder = as_shards(weights(), tmp_path) if kind == "safetensors" else as_bin_shards(weights(), tmp_path)
    index = next(folder.glob("*.index.json"))
    content, rng = index.read_text(), random.Random(0)
    right = bits(weights())
    wrong, refused = [], 0
    for trial in range(300):
        index.write_bytes(mutated_index(content, rng))
        try:
            found = outcome(folder)
        except Exception as error:
            wrong.append(f"{trial}: {type(error).__name__}: {str(error)[:80]}")
            continue
        refused += found is None
        if found is not None and not bits(found).items() <= right.items():
            wrong.append(f"{trial}: read other values")
    assert not wrong, f"{len(wrong)} of 300: " + "; ".join(wrong[:5])
    assert 100 < refused < 300


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "adapter_config.json", "config.json"])
def test_deeply_nested_json_is_no_crash(name: str, opening: str, tmp_path: Path) -> None:
    folder = tiny.folder_of(tmp_path / "model", weights())
    (folder / name).write_text(opening * 100_000)
    assert (outcome(folder) is None) == (name != "config.json")


class Counted:
    """``safe_open`` with a tally of the files opened and the tensors read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[str] = []
        self.read: list[str] = []
        tiny.watch_files(monkeypatch, lambda path: self.opened.append(path.name), self.read.append)


def test_a_hundred_shards_are_checked_by_their_headers_and_folded_by_what_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each header is read once; a fold reads no tensor that it does not merge."""
    tensors = tiny.tower(layers=8)
    folders = []
    for side, content in (("base", tensors), ("expert", tiny.tuned(tensors, 1))):
        folder = tmp_path / side
        folder.mkdir()
        where = {name: f"model-{i:05}-of-00100.safetensors" for i, name in enumerate(content)}
        extra = {f"unused.{i}": f"model-{i:05}-of-00100.safetensors" for i in range(len(content), 100)}
        for name, file in (where | extra).items():
            save_file({name: content.get(name, torch.zeros(3))}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where | extra}))
        folders.append(folder)
    merger = ContinualMerger(folders[0], tiny.Add())
    tally = Counted(monkeypatch)
    checkpoint = merger.check(folders[1], "task", values=False)
    assert len(checkpoint) == 40
    assert len(tally.opened) == len(set(tally.opened)) == 100
    assert tally.read == []
    merger.fold(checkpoint, "task")
    assert set(tally.read) == set(tiny.only_weights(tensors))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [as_pt, as_old_pt], ids=["zip", "old format"])
def test_a_damaged_pickle_is_refused_or_read(make: Callable[[Tensors, Path], Path], tmp_path: Path) -> None:
    path = make(weights(), tmp_path)
    content, rng = path.read_bytes(), random.Random(0)
    wrong, refused = [], 0
    for trial in range(100):
        data = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data[: rng.randrange(len(data))] if trial % 4 == 0 else data))
        try:
            refused += outcome(path) is None
        except Exception as error:
            wrong.append(f"{trial}: {type(error).__name__}: {str(error)[:80]}")
    assert not wrong, f"{len(wrong)} of 100: " + "; ".join(wrong[:5])
    assert refused > 20


# fingerprints


def test_a_fingerprint_tells_names_dtypes_shapes_values_and_order_apart() -> None:
    x = torch.arange(6.0).view(2, 3)
    variants = {
        "same": {"a": x},
        "name": {"b": x},
        "dtype": {"a": x.half()},
        "bits": {"a": x.view(torch.int32)},
        "shape": {"a": x.view(3, 2)},
        "value": {"a": x + 1},
        "zero sign": {"a": -x},
        "twice": {"a": x, "b": x},
        "order": {"b": x, "a": x},
        "none": {},
    }
    prints = {fingerprint(tensors) for tensors in variants.values()}
    assert len(prints) == len(variants)
    assert all(re.fullmatch(r"[0-9a-f]{64}", found) for found in prints)


@pytest.mark.parametrize("tensor", weights().values(), ids=weights())
def test_a_fingerprint_looks_at_values_not_at_memory(tensor: Tensor) -> None:
    strided = torch.stack([tensor, tensor], dim=-1)[..., 0]
    assert fingerprint({"a": strided}) == fingerprint({"a": tensor.clone()})
    assert fingerprint({"a": nn.Parameter(strided, requires_grad=False)}) == fingerprint({"a": tensor})


def test_the_fingerprint_of_known_bytes() -> None:
    """Saved states are compared with it: it must not change between versions."""
    import hashlib

    content = hashlib.sha256(struct.pack("<2f", 1.0, -2.0)).hexdigest()
    expected = hashlib.sha256(f"a torch.float32 (2,) {content}\n".encode()).hexdigest()
    assert fingerprint({"a": torch.tensor([1.0, -2.0])}) == expected
