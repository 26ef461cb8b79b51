"""What is found in an earlier output: its state and its masters."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny import (
    FC1,
    folded,
    tower,
)

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.output import state
from safemerge_pl.output.files import MASTER_FILE, STATE_FILE


def test_tampered_masters_are_refused(tmp_path: Path) -> None:
    """One bit."""
    out = folded(1).save(tmp_path / "out")
    masters = load_file(out / MASTER_FILE)
    masters[FC1].view(torch.int32)[0, 0] ^= 1
    save_file(masters, out / MASTER_FILE)
    with pytest.raises(CheckpointError, match="are not those that the state was saved with"):
        ContinualMerger.load(out, tower())


@pytest.mark.parametrize("damage", ["gone", "cut", "empty"])
def test_damaged_masters_are_refused(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path must not be taken for a hub id."""
    out = folded(1).save(tmp_path / "out")
    file = out / MASTER_FILE
    content = file.read_bytes()
    file.unlink() if damage == "gone" else file.write_bytes(content[:-10] if damage == "cut" else b"")

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    monkeypatch.chdir(tmp_path)
    for folder in (out, Path("out")):
        with pytest.raises(CheckpointError, match=MASTER_FILE):
            ContinualMerger.load(folder, tower())


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"format": 1, "tasks": []}'])
def test_a_broken_state_is_refused(content: str, tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    (out / STATE_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(STATE_FILE)):
        ContinualMerger.load(out, tower())


@pytest.mark.parametrize(("version", "remedy"), [(1, "fold again"), (3, "use a newer")])
def test_a_state_of_another_version_is_refused(version: int, remedy: str, tmp_path: Path) -> None:
    """Its format number is there to be looked at, in a folder and in a checkpoint of Lightning."""
    merger = folded(1)
    out = merger.save(tmp_path / "out")
    values = merger.state_dict() | {"format": version}
    (out / STATE_FILE).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=rf"{STATE_FILE} has format {version}, .*{remedy}"):
        ContinualMerger.load(out, tower())
    with pytest.raises(CheckpointError, match=rf"format {version}, .*{remedy}"):
        merger.load_state_dict(values, tower())


def test_a_folder_that_is_no_merge_is_refused(tmp_path: Path) -> None:
    folder = tiny.folder_of(tmp_path / "base", tower())
    with pytest.raises(CheckpointError, match="is not the output of a merge"):
        ContinualMerger.load(folder, tower())


def test_an_output_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Yesterday's state with today's weights would be refused as tampered."""
    out = folded(1).save(tmp_path / "out")
    real, calls = state.open_checkpoint, []

    def slow(source: Any) -> Any:
        calls.append(source)
        if len(calls) == 1:
            folded(1, 2).save(out)
        return real(source)

    monkeypatch.setattr(state, "open_checkpoint", slow)
    merger = ContinualMerger.load(out, tower())
    assert merger.tasks == ["task1", "task2"]
    assert merger.fingerprint() == folded(1, 2).fingerprint()
