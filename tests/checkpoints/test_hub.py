"""Models of the hub out of its local cache: revisions, offline, incomplete, gated. No network."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from checkpoint_files import weights
from safetensors.torch import save
from tiny import Add, Tensors

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.merger import ContinualMerger

OLD, NEW = "1" * 40, "2" * 40


def add_snapshot(root: Path, name: str, commit: str, files: dict[str, bytes], *refs: str) -> Path:
    """A commit in the layout of the hub's cache: content by hash in blobs, links in snapshots, names in refs."""
    repository = root / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for file, content in files.items():
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).symlink_to(Path("../" * (2 + file.count("/")), "blobs", blob.name))
    for ref in refs:
        path = repository / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return snapshot


def model(tensors: Tensors, **files: Any) -> dict[str, bytes]:
    sides = {f"{name}.json": json.dumps(content).encode() for name, content in files.items()}
    return {"model.safetensors": save(tensors, {"format": "pt"}), **sides}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, offline, and no way out."""
    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    return root


@pytest.fixture
def two_commits(cache: Path) -> Path:
    """An older commit under a tag, a newer one on the main branch and on a pull request's."""
    add_snapshot(cache, "owner/name", OLD, model({"x": torch.zeros(1)}, config={"age": "old"}), "v1.0")
    add_snapshot(cache, "owner/name", NEW, model({"x": torch.ones(1)}, config={"age": "new"}), "main", "refs/pr/7")
    return cache


@pytest.mark.parametrize(
    ("source", "revision", "commit"),
    [
        ("owner/name", None, NEW),
        ("owner/name", "main", NEW),
        ("owner/name", "v1.0", OLD),
        ("owner/name", OLD, OLD),
        ("owner/name@v1.0", None, OLD),
        ("owner/name@main", None, NEW),
        ("owner/name@refs/pr/7", None, NEW),
        (f"owner/name@{OLD}", None, OLD),
        ("owner/name@v1.0", "v1.0", OLD),
    ],
)
def test_a_revision_is_that_of_all_files(two_commits: Path, source: str, revision: str | None, commit: str) -> None:
    """Branch, tag, pull request or commit, found offline; weights and configuration are of one commit."""
    checkpoint = open_checkpoint(source, revision=revision)
    assert checkpoint["x"].item() == (commit == NEW)
    assert checkpoint.folder == two_commits / "models--owner--name" / "snapshots" / commit
    assert json.loads((checkpoint.folder / "config.json").read_text()) == {"age": "new" if commit == NEW else "old"}
    assert checkpoint.source == source


def test_two_revisions_at_once_are_refused(two_commits: Path) -> None:
    with pytest.raises(CheckpointError, match=r"owner/name@main names a revision and `revision` is v1\.0"):
        open_checkpoint("owner/name@main", revision="v1.0")


@pytest.mark.parametrize("source", ["owner/other", "owner/name@v2.0", f"owner/name@{'3' * 40}"])
def test_what_is_not_cached_is_refused_offline(two_commits: Path, source: str) -> None:
    """Names the id and the way out, in one line."""
    with pytest.raises(CheckpointError, match=rf"^{source} is neither.*give a local folder\.$") as caught:
        open_checkpoint(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["owner/name@v1.0", "owner/name"])
def test_an_existing_path_is_taken_as_it_is(
    two_commits: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.folder_of(tmp_path / name, {"local": torch.zeros(1)})
    monkeypatch.chdir(tmp_path)
    assert list(open_checkpoint(name)) == ["local"]


def test_pickles_are_looked_for_where_there_are_no_safetensors(cache: Path, tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    add_snapshot(cache, "owner/old", OLD, {"pytorch_model.bin": (tmp_path / "pytorch_model.bin").read_bytes()}, "main")
    assert open_checkpoint("owner/old")["x"].item() == 1


def test_only_what_is_needed_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same weights as a pickle, or for another framework, are not fetched beside safetensors."""
    asked: list[Any] = []

    def fetch(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, "*.bin" in allow_patterns))
        return str(tiny.folder_of(tmp_path / str(len(asked)), {"x": torch.zeros(1)}))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    open_checkpoint("owner/name@v1")
    assert asked == [("owner/name", "v1", False)]


@pytest.mark.parametrize("lost", ["blob", "file"])
def test_an_incomplete_snapshot_is_refused_with_what_it_lacks(cache: Path, lost: str) -> None:
    """The blob behind a link is gone, or the file was never fetched."""
    snapshot = add_snapshot(cache, "owner/name", OLD, model({"x": torch.zeros(1)}, config={}), "main")
    file = snapshot / "model.safetensors"
    file.resolve().unlink()
    if lost == "file":
        file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint("owner/name")


def test_a_snapshot_that_lacks_shards_lists_them(cache: Path) -> None:
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = {"weight_map": {f"x{i}": name for i, name in enumerate(names)}}
    files = {"model.safetensors.index.json": json.dumps(index).encode(), names[0]: save({"x0": torch.zeros(1)})}
    add_snapshot(cache, "owner/name", OLD, files, "main")
    with pytest.raises(CheckpointError, match=rf"2 of 3 shards are missing: {names[1]}, {names[2]}"):
        open_checkpoint("owner/name")


def test_a_gated_repository_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause and the remedy, no wall of text, and no token."""
    from huggingface_hub.errors import GatedRepoError

    def gated(*args: object, **kwargs: object) -> None:
        request = types.SimpleNamespace(headers={"authorization": "Bearer hf_secret"})
        response: Any = types.SimpleNamespace(headers={}, request=request)
        raise GatedRepoError("401 Client Error.\n\nAccess to this model is restricted.", response=response)

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.snapshot_download", gated)
    with pytest.raises(CheckpointError, match=r"owner/name.*401.*hf auth login") as caught:
        open_checkpoint("owner/name")
    assert "hf_secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


# what is made of them


def test_pretrained_expert_and_adapter_come_from_the_cache(cache: Path, tmp_path: Path) -> None:
    """All three offline, each at a revision; the report names what was asked for."""
    base = tiny.copied(tiny.hf_vision().state_dict())
    add_snapshot(cache, "owner/base", OLD, model(base), "v1")
    add_snapshot(cache, "owner/expert", OLD, model(tiny.tuned(base, 1)), "main")
    add_snapshot(cache, "owner/expert", NEW, model(tiny.tuned(base, 2)), "v2")
    part = "base_model.model.encoder.layers.0.mlp.fc1.lora"
    factors = {f"{part}_A.weight": tiny.randn(2, 8), f"{part}_B.weight": tiny.randn(16, 2)}
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": "owner/base"}
    add_snapshot(
        cache,
        "owner/adapter",
        OLD,
        {
            "adapter_model.safetensors": save(factors),
            "adapter_config.json": json.dumps(settings | {"revision": "v1"}).encode(),
        },
        "main",
    )
    merger = ContinualMerger("owner/base@v1", Add())
    report = merger.fold("owner/expert@v2", "expert")
    assert report.source == "owner/expert@v2"
    assert merger.fold("owner/adapter", "adapter").notes == ()
    expected = tiny.tuned(base, 2)[tiny.FC1] + factors[f"{part}_B.weight"] @ factors[f"{part}_A.weight"]
    torch.testing.assert_close(merger.merged[tiny.FC1], expected)
    add_snapshot(cache, "owner/base", NEW, model(base), "v2")
    (note,) = ContinualMerger("owner/base@v2", Add()).fold("owner/adapter", "adapter").notes
    assert "trained on revision v1 of its base, and is put on `owner/base@v2`" in note


def test_the_command_folds_hub_ids_with_revisions_offline(cache: Path, tmp_path: Path) -> None:
    """By the environment alone; the merged folder has the files of the pretrained revision."""
    base = tiny.copied(tiny.hf_vision().state_dict())
    add_snapshot(cache, "owner/base", OLD, model(base, config={"age": "old"}), "v1")
    add_snapshot(cache, "owner/base", NEW, model(base, config={"age": "new"}), "main")
    add_snapshot(cache, "owner/expert", NEW, model(tiny.tuned(base, 2)), "main")
    output = tmp_path / "out"
    command = ["fold", "--pretrained", "owner/base@v1", "--incoming", "owner/expert", "--output", str(output)]
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_secret"}
    run = subprocess.run(
        [sys.executable, "-m", "safemerge_pl", *command, "--task", "mnist"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "folded 'mnist' as task 1" in run.stdout, run.stderr
    assert "hf_secret" not in run.stdout + run.stderr
    assert json.loads((output / "config.json").read_text()) == {"age": "old"}
    assert not (output / "config.json").is_symlink()


def test_a_backbone_takes_its_revision_with_its_name(two_commits: Path) -> None:
    """Everything that it loads is in that folder."""
    for backbone in (CLIPBackbone("owner/name@v1.0"), CLIPBackbone("owner/name", revision="v1.0")):
        assert backbone.folder().name == OLD
    assert re.fullmatch(f"{NEW}", CLIPBackbone("owner/name").folder().name)


# paths


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
