"""Safetensors files: read by their headers, and damaged ones refused or read right."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from checkpoint_files import as_folder, as_safetensors, as_shards, bits, in_folder, outcome, weights
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from safetensors.torch import save_file
from tiny import Tensors

from safemerge_pl.checkpoints import CheckpointError, match_names, open_checkpoint
from safemerge_pl.merger import ContinualMerger


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


@pytest.mark.parametrize("cut", [1, 10, 400])
def test_a_file_cut_short_is_refused_before_anything_is_read(cut: int, tmp_path: Path) -> None:
    content = save_bytes(weights(), {"format": "pt"})
    folder = in_folder(tmp_path, "model.safetensors", content[:-cut])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors \({len(content) - cut} bytes\) is (truncated|no)"):
        open_checkpoint(folder)


def test_a_file_with_trailing_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(in_folder(tmp_path, "model.safetensors", save_bytes(weights()) + bytes(10)))


def test_metadata_is_not_needed(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    assert sorted(open_checkpoint(tmp_path)) == sorted(weights())


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = as_shards(weights(), tmp_path)
    other = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["layer.fp16"]
    save_file({"layer.weight": torch.zeros(4, 3)}, folder / other)
    with pytest.raises(CheckpointError, match=r"layer\.weight.*also stands in"):
        open_checkpoint(folder)


def test_an_eight_bit_float_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shape("x") == (2, 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor `x` is stored as F8_E4M3.*float32"):
        checkpoint.dtype("x")


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


class Counted:
    """``safe_open`` with a tally of the files opened and the tensors read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[str] = []
        self.read: list[str] = []
        tiny.watch_files(monkeypatch, lambda path: self.opened.append(path.name), self.read.append)


def test_a_hundred_shards_are_checked_by_their_headers_and_folded_by_what_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each header is read once; a fold reads what it merges, and once what else of a model may have been trained."""
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
    weights = {name for name, tensor in tensors.items() if tensor.is_floating_point()}
    assert set(tiny.only_weights(tensors)) < set(tally.read) <= weights, "nothing that the base does not have"
