"""How far a fold is, for whoever waits for it."""

import io
import sys

import pytest
import tiny

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM
from safemerge_pl.runtime import progress as fold_progress
from safemerge_pl.runtime.progress import FoldProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(fold_progress.time, "monotonic", lambda: now[0])
    return now


def test_a_merger_tells_of_every_stack() -> None:
    merger = ContinualMerger(tiny.tower(), OPCM())
    calls: list[tuple[str, int, int]] = []
    merger.progress = lambda *what: calls.append(what)
    report = merger.fold(tiny.tuned(tiny.tower(), 1), "mnist")
    total = sum(tensor.numel() for tensor in merger.merged_parameters().values())
    assert len(report.layers) > len(calls)
    assert {(task, count) for task, _, count in calls} == {("mnist", total)}
    done = [count for _, count, _ in calls]
    assert done[0] == 0
    assert done[-1] == total
    assert done == sorted(set(done))


def test_a_log_gets_a_line_now_and_then(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    progress = FoldProgress()
    for task in ("mnist", "flags"):
        for done in range(5):
            progress(task, done, 4)
            clock[0] += 20
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["mnist: 50% merged, about 40 s left", "flags: 50% merged, about 40 s left"]


def test_a_terminal_gets_a_bar_that_goes_away(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with FoldProgress() as progress:
        progress("mnist", 0, 4)
        progress("mnist", 1, 4)
        assert progress._bar is None  # a short fold shows nothing
        clock[0] = 2.0
        progress("mnist", 2, 4)
        assert progress._bar is not None
        progress("mnist", 4, 4)
        assert progress._bar is None
    assert "folding mnist" in terminal.getvalue()
    assert "50%" in terminal.getvalue()


def test_a_fold_that_fails_leaves_the_terminal_as_it_was(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = FoldProgress(after=0.0)

    def fail() -> None:
        with progress:
            progress("mnist", 0, 4)
            progress("mnist", 1, 4)
            assert progress._bar is not None
            raise CheckpointError("the expert is damaged")

    with pytest.raises(CheckpointError, match="damaged"):
        fail()
    assert progress._bar is None
