"""Whatever fails, and whenever: the output is yesterday's or today's, whole, and folding again gives the same bits."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from faults import FULL, failing
from folders import beside, clip_folder
from safetensors.torch import load_file
from tiny import assert_same, folded, fresh, tower, tuned

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.commands.fold import fold_once
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.output import folders
from safemerge_pl.output.folders import staged_folder


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path below it; none of a folder that is not there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(params=["one step", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Folders are exchanged in one step where the system can, and renamed twice elsewhere."""
    if request.param == "two renames":
        monkeypatch.setattr(folders, "_exchange", lambda *paths: False)
    return str(request.param)


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("kind", ["write", "tensor", "rename", "fsync", "copyfile", "mkdir", "open", "write_text"])
@pytest.mark.parametrize("earlier", [False, True], ids=["new", "earlier merge"])
def test_a_fault_at_any_call_leaves_the_earlier_merge(
    kind: str, earlier: bool, error: BaseException, swap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of every kind fails in turn; the state in memory can be saved all the same."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # it takes long, and is only told from others by failing
    base = tiny.folder_of(tmp_path / "base", tower(), config={"model_type": "x"}, tokenizer={})
    merger = fresh(base)
    merger.fold(tuned(tower(), 1), "task1")
    yesterday, out = merger.save(tmp_path / "yesterday"), tmp_path / "out"
    (yesterday / "notes.txt").write_text("mine")
    merger.fold(tuned(tower(), 2), "task2")
    if earlier:
        shutil.copytree(yesterday, out)
    with failing(kind) as count:
        merger.save(out)
    assert bool(count.calls) == ((kind, swap, earlier) != ("rename", "one step", True))
    failed = 0
    for at in range(0, count.calls, {"tensor": 7, "open": 3}.get(kind, 1)):
        shutil.rmtree(out)
        if earlier:
            shutil.copytree(yesterday, out)
        before = content(out) if earlier else {}
        with failing(kind, at, error):
            problem = attempt(lambda: merger.save(out))
        assert beside(out) == ["base", "yesterday"] or kind == "open"  # which is needed to remove a folder, too
        if problem is None:  # a call whose failure does no harm
            assert_same(load_file(out / "model.safetensors"), merger.merged)
        else:
            failed += 1
            if isinstance(error, OSError) or content(out) == before:
                assert content(out) == before, at
            else:  # an interrupt after all was done
                assert ContinualMerger.load(out, base).fingerprint() == merger.fingerprint()
            if isinstance(error, OSError):
                assert re.search(r"out (could not|cannot) be written .*No space left .*another folder", problem)
        merger.save(out)
        assert beside(out) == ["base", "yesterday"]
        assert ContinualMerger.load(out, base).fingerprint() == merger.fingerprint()
        assert (out / "notes.txt").exists() == earlier
    assert failed or not count.calls


def attempt(work: Callable[[], object]) -> str | None:
    """What it raised, in words."""
    try:
        work()
    except (CheckpointError, KeyboardInterrupt) as raised:
        return str(raised)
    return None


def test_a_real_limit_of_the_system_is_told_in_words(tmp_path: Path) -> None:
    """The kernel itself refuses to let a file grow."""
    out = folded(1).save(tmp_path / "out")
    before = content(out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"out could not be written .*untouched"):
            folded(1, 2).save(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert content(out) == before
    assert beside(out) == []


def test_a_disk_without_room_is_refused_before_anything_is_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From shapes and dtypes; the message has both numbers."""
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 2**20 + 5000))

    def never(*args: object) -> None:
        raise AssertionError("it was folded")

    monkeypatch.setattr(ContinualMerger, "fold", never)
    with pytest.raises(CheckpointError, match=r"out needs about 1\.1 MB and .* has 1\.1 MB free; free some space"):
        fold_once(str(base), str(base), str(tmp_path / "out"))
    assert beside(tmp_path / "out") == ["base"]


def test_what_dead_processes_left_is_swept_away(tmp_path: Path, swap: str) -> None:
    """Partial and old folders of this output; never those of another one."""
    out = folded(1).save(tmp_path / "out")
    for name in (".out.partial-4711", f".out.partial-{os.getpid()}", ".out.old-4711", ".out2.partial-4711", ".outer"):
        shutil.copytree(out, tmp_path / name)
    folded(1, 2).save(out)
    assert beside(out) == [".out2.partial-4711", ".outer"]


def test_a_fault_in_the_body_leaves_nothing(tmp_path: Path) -> None:
    """Also of the folders above that were made for it."""

    def half() -> None:
        with staged_folder(tmp_path / "a" / "b" / "out") as staging:
            (staging / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["every event", "soak", "race"])
def test_killed_at_any_moment_and_gone_on(mode: str, tmp_path: Path) -> None:
    """``safemerge fold`` day after day into one output, by processes that are killed or compete.

    *every event*: SIGKILL before each file operation in turn. *soak*: SIGKILL at random moments. *race*: two at once.
    """
    base = clip_folder(tmp_path / "base")
    for seed in range(1, 5):
        clip = tiny.hf_clip()
        clip.load_state_dict(tuned(clip.state_dict(), seed))
        clip.half().save_pretrained(tmp_path / f"task{seed}")
    command = [sys.executable, str(Path(__file__).parent.with_name("killed.py")), mode, str(tmp_path)]
    path = os.pathsep.join([str(Path(folders.__file__).parents[2]), str(Path(__file__).parent.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["refused" if mode == "race" else "killed"] >= 3
    assert base.exists()
