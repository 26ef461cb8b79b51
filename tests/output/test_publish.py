"""Outputs on the hub, against a stand-in of the client's API."""

from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import fast_method, folded, fresh, tower, tuned

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.cli import main
from safemerge_pl.commands.fold import fold_once
from safemerge_pl.merger import ContinualMerger


class Hub:
    """Repositories by name, with the calls of ``HfApi`` that are used and their meaning."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.fails: Exception | None = None

    def __call__(self) -> "Hub":
        return self

    def whoami(self) -> dict[str, str]:
        if self.fails is not None:
            raise self.fails
        return {"name": "owner"}

    def repo_exists(self, repo_id: str) -> bool:
        return repo_id in self.files

    def list_repo_files(self, repo_id: str) -> list[str]:
        return list(self.files[repo_id])

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        if repo_id not in self.files:
            self.files[repo_id], self.private[repo_id] = {".gitattributes": b""}, private
        elif not exist_ok:
            raise ValueError(f"{repo_id} exists")
        return f"https://hub.test/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str, delete_patterns: str) -> None:
        assert delete_patterns == "*"
        kept = {name: data for name, data in self.files[repo_id].items() if name == ".gitattributes"}
        paths = [path for path in folder_path.rglob("*") if path.is_file()]
        self.files[repo_id] = kept | {path.relative_to(folder_path).as_posix(): path.read_bytes() for path in paths}
        self.messages.append(commit_message)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", found)
    return found


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def on_hub(hub: Hub, repo: str) -> dict[str, bytes]:
    return {name: data for name, data in hub.files[repo].items() if name != ".gitattributes"}


def test_the_folder_on_the_hub_is_the_one_on_disk(hub: Hub, tmp_path: Path) -> None:
    merger = folded(1)
    out = merger.save(tmp_path / "out", max_shard_size="2KB")
    assert merger.push_to_hub("owner/merge") == "https://hub.test/owner/merge"
    assert hub.private == {"owner/merge": True}
    assert on_hub(hub, "owner/merge") == on_disk(out)
    merger.fold(tuned(tower(), 2), "next")
    with pytest.raises(CheckpointError, match=r"the merge is not saved as it is, .*: `save` it first"):
        merger.push_to_hub("owner/merge")
    merger.save(out)
    merger.push_to_hub("owner/merge", private=False)
    assert on_hub(hub, "owner/merge") == on_disk(out), "shards of yesterday are gone"
    assert hub.private == {"owner/merge": True}
    assert hub.messages == ["Merge task1", "Merge task1, next"]
    merger.push_to_hub("owner/open", private=False, message="first")
    assert (hub.private["owner/open"], hub.messages[-1]) == (False, "first")


def test_a_merge_of_which_a_part_is_deployed_can_be_published(hub: Hub, tmp_path: Path) -> None:
    """Its state holds the hash of the whole accumulated vector, not of what is deployed."""
    merger = ContinualMerger(tower(), fast_method(), max_response=1e-4)
    merger.fold(tuned(tower(), 1), "task1")
    assert merger.scale < 1
    out = merger.save(tmp_path / "out")
    merger.push_to_hub("owner/merge")
    assert on_hub(hub, "owner/merge") == on_disk(out)


def test_fold_and_push(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    task, out = tiny.folder_of(tmp_path / "task", tuned(tower(), 1)), tmp_path / "out"
    places = ["--pretrained", str(base), "--incoming", str(task), "--output", str(out)]
    main(["fold", *places, "--push_to_hub", "owner/merge", "--method", "TaskArithmetic"])
    assert capsys.readouterr().out.splitlines()[-1] == "on the hub: owner/merge, private unless it was public before"
    assert on_hub(hub, "owner/merge") == on_disk(out)


@pytest.mark.parametrize(
    ("repo", "fails", "message"),
    [
        ("merge", None, r"merge cannot be written \(it must be owner/name\)\."),
        ("owner/other", None, r"it holds model.bin and no merge_state.json, so it is no earlier merge; name another"),
        ("owner/merge", ConnectionError("no route\nto host"), r"owner/merge cannot be written \(no route\)\."),
        ("owner/merge", "token", r"owner/merge cannot be written: log in with `hf auth login`\."),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_fold(
    repo: str, fails: Any, message: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.errors import LocalTokenNotFoundError

    hub.files["owner/other"] = {".gitattributes": b"", "model.bin": b"x"}
    hub.fails = LocalTokenNotFoundError("Token is required") if fails == "token" else fails
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    tiny.refuse_to_read(monkeypatch)
    with pytest.raises(CheckpointError, match=message):
        fold_once(str(base), str(base), str(tmp_path / "out"), push_to_hub=repo)
    assert not (tmp_path / "out").exists()
    assert hub.messages == []


def test_a_merge_that_was_never_saved(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="`save` it first"):
        fresh().push_to_hub("owner/merge")


def test_the_client_has_the_calls_of_the_stand_in() -> None:
    import inspect

    from huggingface_hub import HfApi

    for name in ("whoami", "repo_exists", "list_repo_files", "create_repo", "upload_folder"):
        theirs = inspect.signature(getattr(HfApi, name)).parameters
        assert set(inspect.signature(getattr(Hub, name)).parameters) <= set(theirs)
