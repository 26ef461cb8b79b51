"""Output folders: where they may be, what stays in them, and what a kill leaves behind."""

import builtins
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from folders import beside
from safetensors.torch import load_file
from tiny import assert_same, folded, fresh, tower, tuned

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.commands.fold import fold_once
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.output.files import STATE_FILE
from safemerge_pl.output.folders import check_output


def test_what_the_user_added_survives_and_what_is_stale_goes(tmp_path: Path) -> None:
    """An earlier merge is replaced: our old files go, foreign files and folders stay."""
    first = tiny.folder_of(tmp_path / "first", tower(), config={"made": 1}, tokenizer={})
    merger = fresh(first)
    merger.fold(tuned(tower(), 1), "a")
    out = merger.save(tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    (out / "plots").mkdir()
    (out / "plots" / "x.png").write_bytes(b"png")
    second = tiny.folder_of(tmp_path / "second", tower(), config={"made": 2})
    for seed in (2, 3):
        merger.fold(tuned(tower(), seed), str(seed))
        merger.save(out, template=second)
        assert (out / "notes.txt").read_text() == "mine"
        assert (out / "plots" / "x.png").read_bytes() == b"png"
        assert not (out / "tokenizer.json").exists()
        assert json.loads((out / "config.json").read_text()) == {"made": 2}
        assert_same(load_file(out / "model.safetensors"), merger.merged)
        assert json.loads((out / STATE_FILE).read_text())["tasks"] == merger.tasks
    assert beside(out) == ["first", "second"]


@pytest.mark.parametrize("how", ["equal", "inside", "through a link", "link inside", "another spelling"])
def test_an_output_in_the_base_is_refused(how: str, tmp_path: Path) -> None:
    base = tiny.folder_of(tmp_path / "base", tower())
    (tmp_path / "link").symlink_to(base)
    out = {
        "equal": base,
        "inside": base / "merged",
        "through a link": tmp_path / "link",
        "link inside": tmp_path / "link" / "merged",
        "another spelling": tmp_path / "base" / ".." / "base",
    }[how]
    before = (base / "model.safetensors").read_bytes()
    merger = fresh(base)
    merger.fold(tuned(tower(), 1), "a")
    with pytest.raises(CheckpointError, match="is or lies inside the input"):
        merger.save(out)
    assert [path.name for path in base.iterdir()] == ["model.safetensors"]
    assert (base / "model.safetensors").read_bytes() == before


def test_a_folder_with_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="is not empty and holds no earlier merge"):
        folded(1).save(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    assert beside(tmp_path / "out") == []


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        folded(1).save(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "x"


@pytest.mark.parametrize("out", ["out", "new/deeper/out", "a+b@c d", "out/"])
def test_relative_and_odd_paths_are_fine(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folded(1).save(out)
    assert ContinualMerger.load(out, tower()).tasks == ["task1"]


def test_the_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be replaced in one step below the feet of whoever stands in it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="name another folder"):
        folded(1).save(".")
    assert list(tmp_path.iterdir()) == []


def test_an_output_behind_a_link_leaves_nothing_behind(tmp_path: Path) -> None:
    """A link to an earlier merge, on another disk perhaps."""
    real = folded(1).save(tmp_path / "disk" / "merge")
    (tmp_path / "home").mkdir()
    link = tmp_path / "home" / "out"
    link.symlink_to(real)
    folded(1, 2).save(link)
    assert ContinualMerger.load(link, tower()).tasks == ["task1", "task2"]
    assert beside(link) == beside(real) == []


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root ignores mode bits: refuse every kind of writing instead."""

    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    real_open, real_path_open = builtins.open, Path.open

    def checked(real: Callable[..., Any]) -> Callable[..., Any]:
        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return denied() if set(mode) & set("wax+") else real(file, mode, *args, **kwargs)

        return open_

    monkeypatch.setattr(builtins, "open", checked(real_open))
    monkeypatch.setattr(Path, "open", checked(real_path_open))
    for name in ("touch", "mkdir", "write_text", "write_bytes"):
        monkeypatch.setattr(Path, name, denied)
    monkeypatch.setattr(os, "mkdir", denied)


@pytest.mark.parametrize("kind", ["new", "earlier merge"])
def test_a_read_only_place_is_refused_in_words(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    merger = folded(1)
    if kind == "earlier merge":
        merger.save(out)
    with monkeypatch.context() as patch:
        read_only(patch)
        with pytest.raises(CheckpointError, match=r"out cannot be written \(Permission denied\); name another folder"):
            merger.save(out)
    assert out.exists() == (kind == "earlier merge")
    assert beside(out) == []


def test_what_a_killed_process_left_is_never_taken_for_a_merge(tmp_path: Path) -> None:
    """Weights without the state, which is written last."""
    out = folded(1).save(tmp_path / "out")
    partial = tmp_path / ".out.partial-1"
    shutil.copytree(out, partial)
    (partial / STATE_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"holds no {STATE_FILE}"):
        ContinualMerger.load(partial, tower())
    folded(1, 2).save(out)
    assert ContinualMerger.load(out, tower()).tasks == ["task1", "task2"]


def test_a_kill_between_the_two_renames_is_mended_at_the_next_use(tmp_path: Path) -> None:
    """After SIGKILL the earlier merge lies aside; reading it or writing there again brings it back."""
    out = folded(1).save(tmp_path / "out")
    out.rename(tmp_path / ".out.old-4711")
    assert ContinualMerger.load(out, tower()).tasks == ["task1"]
    (out / "notes.txt").write_text("mine")
    out.rename(tmp_path / ".out.old-4711")
    folded(1, 2).save(out)
    assert ContinualMerger.load(out, tower()).tasks == ["task1", "task2"]
    assert (out / "notes.txt").read_text() == "mine"
    assert beside(out) == []


@pytest.mark.parametrize("name", ["[a]", "a*", "a b?", "ä.x"])
def test_an_odd_name_is_recovered_too(name: str, tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / name)
    out.rename(tmp_path / f".{name}.old-1")
    assert ContinualMerger.load(out, tower()).tasks == ["task1"]


def test_an_old_folder_that_is_not_whole_is_not_brought_back(tmp_path: Path) -> None:
    """A kill while the old folder was being removed."""
    out = folded(1).save(tmp_path / "out")
    out.rename(tmp_path / ".out.old-1")
    shutil.copytree(tmp_path / ".out.old-1", tmp_path / ".out.old-2")
    (tmp_path / ".out.old-2" / STATE_FILE).unlink()
    assert ContinualMerger.load(out, tower()).tasks == ["task1"]


def test_a_mount_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume of a container: it can be written, but not replaced."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"is a mount point, .*; name a folder inside it"):
        check_output(tmp_path / "out")
    check_output(tmp_path / "out" / "merge")


def test_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="is a link to a place that is gone"):
        folded(1).save(tmp_path / "out")


def test_a_read_only_parent_is_refused() -> None:
    """The folder itself can be written, but not replaced. Root may do anything, so another user is played."""
    script = """
import os, sys
from pathlib import Path
from safemerge_pl.output.folders import check_output
place = Path(sys.argv[1])
place.chmod(0o555)
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    check_output(place / "out")
except ValueError as error:
    print(error)
"""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "out").mkdir()
        (Path(place) / "out").chmod(0o777)
        run = subprocess.run([sys.executable, "-c", script, place], capture_output=True, text=True, check=True)
        Path(place).chmod(0o755)
    assert "out cannot be written (Permission denied); name another folder." in run.stdout


def test_an_output_that_holds_an_input_is_refused(tmp_path: Path) -> None:
    """The base would be moved away with the earlier merge."""
    out = folded(1).save(tmp_path / "out")
    base = tiny.folder_of(out / "base", tower())
    with pytest.raises(CheckpointError, match="holds the input"):
        fold_once(str(base), str(tmp_path), str(out), merged=str(out))


def test_links_that_the_user_put_into_an_output_stay_links(tmp_path: Path) -> None:
    """Also one that leads nowhere."""
    out = folded(1).save(tmp_path / "out")
    (out / "last").symlink_to("model.safetensors")
    (out / "gone").symlink_to(tmp_path / "gone")
    (out / "plots").mkdir()
    (out / "plots" / "x").symlink_to("../README.md")
    folded(1, 2).save(out)
    assert os.readlink(out / "last") == "model.safetensors"
    assert os.readlink(out / "gone") == str(tmp_path / "gone")
    assert (out / "plots" / "x").read_text() == (out / "README.md").read_text()
