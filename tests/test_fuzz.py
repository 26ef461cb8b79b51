"""Damaged files, a thousand of them from fixed seeds: each opens to equal tensors or ends in one clear sentence."""

import json
import pickle
import random
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import shards
from safetensors.torch import save, save_file
from tiny import Tensors, folded, tower, tuned
from torch import Tensor

from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.data.image_sets import FOLDER, SetSpec
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.output.files import LEDGER_FILE, STATE_FILE
from safemerge_pl.output.saving import read_merge
from safemerge_pl.runtime.memory import PeakMemory

Change = Callable[[bytes, random.Random], bytes]

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**40,
    2**63,
    1e308,
    "",
    "x",
    "\0",
    "../x",
    "é",
    [],
    {},
    [[]],
    {"": None},
    [None] * 3,
]
"""Values that stand where another belongs."""

TEXTS = (b"null", b"[]", b"{}", b"\xff\xfe", b"0", b'"', b"{", b"[" * 5000, b"1e999", b"NaN", b" ", b"\n", b"\0" * 8)


def weights() -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {
        "layer.weight": torch.randn(3, 4, generator=generator),
        "layer.bias": torch.randn(3, generator=generator).half(),
        "ids": torch.arange(4),
    }


def flip(data: bytes, rng: random.Random) -> bytes:
    """Some bits of the first bytes, where the structure is, or anywhere."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(min(len(changed), rng.choice((16, 400, len(changed)))))
        changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + rng.choice(TEXTS) + data[place + rng.choice((0, 1, 4)) :]


def repeat(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    part = data[start : start + rng.randint(1, 40)]
    return data[:start] + part * rng.randint(2, 5) + data[start + len(part) :]


def drop(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.randint(1, 40) :]


CHANGES: tuple[Change, ...] = (flip, flip, cut, insert, repeat, drop)


def odd_value(content: Any, rng: random.Random) -> Any:
    """Nested values with one of them replaced, taken out, renamed or put in twice."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    content = json.loads(json.dumps({"": content}))
    walk(content)
    node, key = rng.choice(places)
    what = rng.randrange(4)
    if what == 0 and key != "":
        del node[key]
    elif what == 1 and isinstance(node, dict) and key != "":
        node[rng.choice(("x", key + "x", key.upper(), "[", "(" * 300))] = node.pop(key)
    else:
        node[key] = rng.choice(ODD)
    return content[""]


def header(tensors: Tensors, rng: random.Random) -> bytes:
    """A safetensors file with another header than its tensors have, well formed and of the right length."""
    data = save(tensors)
    size = struct.unpack("<Q", data[:8])[0]
    content = odd_value(json.loads(data[8 : 8 + size]), rng)
    if isinstance(content, dict) and rng.random() < 0.3:  # a terabyte is promised
        content["layer.weight"] = {"dtype": "F32", "shape": [2**19, 2**19], "data_offsets": [0, 2**40]}
    text = json.dumps(content).encode()
    return struct.pack("<Q", rng.choice((len(text), len(text), 2**40, 2**63))) + text + data[8 + size :]


@pytest.fixture
def little_memory() -> Iterator[None]:
    """What is really used stays small, whatever a file promises; memory that is asked for and not touched is none."""
    with PeakMemory() as peak:
        yield
    assert peak.mib is None or peak.mib < 256


@pytest.fixture
def harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No change of a byte may make a program of a pickle."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the unpickler that runs code was used")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)


def refused(read: Callable[[], Any], *errors: type[Exception]) -> bool:
    """Whether reading ends in one sentence; any other error is a failure of the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read()
        except errors as error:
            text = str(error)
            assert "\n" not in text, text
            assert len(text) < 2000, text
            return True
    return False


def opened(path: Path) -> dict[str, Tensor]:
    """Everything that a merge would look at."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint:
        checkpoint.shape(name), checkpoint.dtype(name)
    return {name: checkpoint[name].clone() for name in checkpoint}


def assert_known(found: dict[str, Tensor], known: Tensors) -> None:
    """What opens has the values of the file: a flipped bit of a value is one, too, so only the layout is compared."""
    for tensor in found.values():
        assert tensor.numel() <= sum(each.numel() * each.element_size() for each in known.values())


def files(kind: str, folder: Path) -> tuple[Path, Path]:
    """What is given, and the file of it that is damaged."""
    tensors, folder = weights(), folder / kind.replace("/", "-")
    folder.mkdir()
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors")
        return folder, folder / "model.safetensors"
    if kind.startswith("pickle"):
        _, name, zipped = kind.split("/")
        content = {"state_dict": tensors, "epoch": 3} if name.endswith("ckpt") else tensors
        torch.save(content, folder / name, _use_new_zipfile_serialization=zipped == "zip")
        return folder / name, folder / name
    if kind.startswith("index"):
        suffix = kind.partition("/")[2]
        shards(folder, tensors, suffix, save_file if suffix == "safetensors" else torch.save)
        return folder, next(folder.glob("*.index.json"))
    factors = {f"base_model.model.q.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"q": 2}, "target_modules": ["q"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "a/b"}))
    file = folder / ("adapter_model.bin" if kind.endswith("bin") else "adapter_model.safetensors")
    torch.save(factors, file) if kind.endswith("bin") else save_file(factors, file)
    return folder, folder / "adapter_config.json" if kind.startswith("adapter config") else file


BINARY = {
    "safetensors": 150,
    "pickle/pytorch_model.bin/zip": 100,
    "pickle/model.pt/zip": 60,
    "pickle/model.pth/old": 130,
    "pickle/last.ckpt/zip": 100,
    "pickle/last.ckpt/old": 60,
    "index/safetensors": 60,
    "index/bin": 60,
    "adapter/safetensors": 60,
    "adapter/bin": 60,
    "adapter config/safetensors": 60,
}
"""Damaged files of each kind."""


def read(path: Path) -> None:
    found = opened(path)
    checkpoint = open_checkpoint(path)
    for module in getattr(checkpoint, "modules", ()):
        checkpoint.scale(module)  # type: ignore[attr-defined]
        checkpoint.factor_shapes(module)  # type: ignore[attr-defined]
    assert_known(found, weights())


@pytest.mark.usefixtures("little_memory", "harmless")
@pytest.mark.parametrize("kind", BINARY)
def test_damaged_bytes(kind: str, tmp_path: Path) -> None:
    given, file = files(kind, tmp_path)
    whole, ends = file.read_bytes(), 0
    known = opened(given)
    for seed in range(BINARY[kind]):
        rng = random.Random(f"{kind} {seed}")
        file.write_bytes(rng.choice(CHANGES)(whole, rng))
        ends += refused(lambda: read(given), CheckpointError)
    assert ends > 0
    file.write_bytes(whole)
    again = opened(given)
    assert all(torch.equal(again[name], tensor) for name, tensor in known.items())


@pytest.mark.usefixtures("little_memory")
def test_headers_that_promise_something_else(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for seed in range(150):
        file.write_bytes(header(weights(), random.Random(seed)))
        refused(lambda: read(file), CheckpointError)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("kind", ["index/safetensors", "index/bin", "adapter config/safetensors"])
def test_odd_values_in_json(kind: str, tmp_path: Path) -> None:
    given, file = files(kind, tmp_path)
    content, known, seen = json.loads(file.read_text()), opened(given), []

    def compare() -> None:
        read(given)
        seen.append(opened(given))

    for seed in range(100):
        file.write_text(json.dumps(odd_value(content, random.Random(seed))))
        refused(compare, CheckpointError)
    for found in seen:
        assert found.keys() <= known.keys()  # a shard that no entry names is not there
        assert found
        assert all(torch.equal(tensor, known[name]) for name, tensor in found.items())


@pytest.mark.usefixtures("little_memory")
def test_the_configuration_of_a_model(tmp_path: Path) -> None:
    """It says whether a model is quantised; a merge does not need it, so damage is passed over or refused."""
    save_file(tower(), tmp_path / "model.safetensors")
    content = {"model_type": "clip", "quantization_config": {"quant_method": "gptq", "bits": 4}, "layers": [1, 2]}

    def save_beside() -> None:
        folded(1, pretrained=open_checkpoint(tmp_path)).save(tmp_path.with_name("output"))  # type: ignore[arg-type]

    for seed in range(60):
        rng = random.Random(seed)
        text = json.dumps(odd_value(content, rng)).encode()
        (tmp_path / "config.json").write_bytes(rng.choice(CHANGES)(text, rng) if seed % 2 else text)
        refused(lambda: opened(tmp_path), CheckpointError)
        if seed < 20:
            refused(save_beside, CheckpointError)


@pytest.mark.usefixtures("little_memory")
def test_the_state_of_a_merge(tmp_path: Path) -> None:
    out = folded(1, 2).save(tmp_path / "out")
    whole = (out / STATE_FILE).read_bytes()
    content = json.loads(whole)

    def go_on() -> None:
        merger = ContinualMerger.load(out, tower())
        merger.fold(tuned(tower(), 3), "new")
        merger.save(tmp_path / "next")

    for seed in range(200):
        rng = random.Random(seed)
        odd = json.dumps(odd_value(content, rng)).encode()
        (out / STATE_FILE).write_bytes(odd if seed % 2 else rng.choice(CHANGES)(whole, rng))
        kept = (out / STATE_FILE).read_bytes()
        refused(lambda: ContinualMerger.load(out, tower()), CheckpointError)
        if seed % 4 == 1:  # what opens can be used
            refused(go_on, CheckpointError)
        assert (out / STATE_FILE).read_bytes() == kept
    (out / STATE_FILE).write_bytes(whole)
    assert ContinualMerger.load(out, tower()).tasks == ["task1", "task2"]


@pytest.mark.usefixtures("little_memory")
def test_a_ledger(tmp_path: Path) -> None:
    """It is never needed to go on: lines that are damaged are written anew."""
    merger = folded(1, 2)
    out = merger.save(tmp_path / "out")
    whole = (out / LEDGER_FILE).read_bytes()
    for seed in range(60):
        rng = random.Random(seed)
        (out / LEDGER_FILE).write_bytes(rng.choice(CHANGES)(whole, rng))
        if not refused(lambda: read_merge(out).ledger(), CheckpointError):
            again = ContinualMerger.load(out, tower())
            assert len(again.ledger) == 2
            assert [json.loads(line)["index"] for line in again.ledger] == [1, 2]


@pytest.mark.usefixtures("little_memory")
def test_the_description_of_a_set(tmp_path: Path) -> None:
    import yaml

    file = tmp_path / "set.yaml"
    wholes = [(FOLDER / name).read_bytes() for name in ("eurosat.yaml", "mnist.yaml", "imagenet-r.yaml")]
    contents = [yaml.safe_load(whole) for whole in wholes]
    for seed in range(200):
        rng = random.Random(seed)
        whole, content = wholes[seed % 3], contents[seed % 3]
        text = json.dumps(odd_value(content, rng)).encode() if seed % 2 else rng.choice(CHANGES)(whole, rng)
        file.write_bytes(text)
        refused(lambda: SetSpec.read(file), ValueError)
