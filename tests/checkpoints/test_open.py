"""Every kind of source opens; an index, a folder or a file that is broken is refused by name."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from checkpoint_files import (
    as_bin,
    as_bin_shards,
    as_ckpt,
    as_folder,
    as_folder_text,
    as_lone_file_in_folder,
    as_mapping,
    as_module,
    as_nested_mapping,
    as_old_pt,
    as_open_clip_bin,
    as_open_clip_folder,
    as_pt,
    as_safetensors,
    as_shards,
    as_training_dict,
    bits,
    in_folder,
    outcome,
    weights,
)
from safetensors.torch import save_file
from tiny import Tensors

from safemerge_pl.checkpoints import CheckpointError, open_checkpoint

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


# one level off


@pytest.mark.parametrize(
    ("places", "named"),
    [
        (
            ["checkpoint-500/model.safetensors", "checkpoint-1000/model.safetensors"],
            ["checkpoint-500", "checkpoint-1000"],
        ),
        (["final/pytorch_model.bin", "runs/events.out"], ["final"]),
        (["adapter/adapter_model.safetensors"], ["adapter"]),
        (["version_0/checkpoints/last.ckpt"], ["version_0/checkpoints/last.ckpt"]),
        (["snapshots/abc/model.safetensors", "refs/main"], ["snapshots/abc"]),
        (["original/consolidated.00.pth", "README.md"], ["original/consolidated.00.pth"]),
        (["lit_model.pth"], ["lit_model.pth"]),
        (["best.ckpt", "last.ckpt"], ["best.ckpt", "last.ckpt"]),
        (["fold0/model_best.pth", "fold1/model_best.pth"], ["fold0/model_best.pth", "fold1/model_best.pth"]),
        (["run/model-00001-of-00002.safetensors", "run/model-00002-of-00002.safetensors"], ["run"]),
    ],
)
def test_a_folder_one_level_off_names_the_checkpoints_inside(
    places: list[str], named: list[str], tmp_path: Path
) -> None:
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights(), tmp_path / place)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path} holds no weights: expected one of")
    inside = message[message.index("(") :]
    assert all(name in inside for name in named)
    assert "events" not in inside
    assert "main" not in inside


def test_of_many_checkpoints_inside_a_few_are_named(tmp_path: Path) -> None:
    for step in range(20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        torch.save(weights(), tmp_path / f"checkpoint-{step}/pytorch_model.bin")
    with pytest.raises(CheckpointError, match="and 15 more"):
        open_checkpoint(tmp_path)
