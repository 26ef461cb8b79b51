"""The progress bar of a stream."""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loops import Classifier, batches, encoder, live
from terminals import Terminal, console, shown

from safemerge_pl.callbacks import MergedModelWriter, StreamProgress
from safemerge_pl.merger import ContinualMerger

Make = Callable[..., Any]


pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


def test_the_other_callbacks_go_along(make_trainer: Make, tmp_path: Path, capsys: Any) -> None:
    """The stream's own progress bar and writer work in a training loop, too."""
    writer = MergedModelWriter(folder=str(tmp_path / "out"))
    merge, module = live(boundary="fit"), Classifier()
    base = encoder(module)
    make_trainer(merge, writer, StreamProgress(), enable_progress_bar=True, max_epochs=2).fit(
        module, batches(0), batches(0)
    )
    assert "merged model" in capsys.readouterr().out
    assert ContinualMerger.load(tmp_path / "out", base).tasks == ["task1"]


def scored(bar: StreamProgress) -> Any:
    """Go through two sets of three batches, with a line after each."""
    scorer: Any = SimpleNamespace(data=SimpleNamespace(count_batches=lambda name: 3), progress=None)
    with bar.scoring(scorer, ["mnist", "flags"], "some [models]"):
        for name in ("mnist", "flags"):
            for _ in range(3):
                scorer.progress(1)
            if bar._live is not None:
                bar._live.refresh()  # as ten times a second
            bar.print(f"  expert [{name}]  acc 50.0")
    return scorer


def test_a_bar_moves_while_other_models_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above it the lines, each from the start of its line and whole; nothing stays of the bar."""
    out = console(kind=Terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    assert scored(StreamProgress()).progress is None
    plain = re.sub(r"\x1b\[[0-9;?]*[A-JL-Za-z]", "", shown(out))  # all but "erase this line"
    *lines, last = re.split(r"\r\x1b\[2K|\n", plain)
    assert [line for line in lines if "expert" in line] == [f"  expert [{n}]  acc 50.0" for n in ("mnist", "flags")]
    moved = [line for line in lines if line.startswith("scoring some [models] ")]
    assert {line.split()[-2] for line in moved} >= {"0%", "50%", "100%"}
    assert shown(out).endswith("\x1b[1A\x1b[2K")
    assert last == ""


@pytest.mark.parametrize("kind", [io.TextIOWrapper, Terminal])
def test_a_log_gets_the_lines_alone_and_other_processes_nothing(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out, bar = console(kind=kind), StreamProgress()
    monkeypatch.setattr(sys, "stdout", out)
    if kind is Terminal:
        bar.disable()
    scored(bar)
    lines = "" if kind is Terminal else "  expert [mnist]  acc 50.0\n  expert [flags]  acc 50.0\n"
    assert shown(out) == lines


def test_an_error_leaves_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    out, bar = console(kind=Terminal), StreamProgress()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    scorer: Any = SimpleNamespace(data=SimpleNamespace(count_batches=lambda name: 3), progress=None)
    with pytest.raises(KeyboardInterrupt), bar.scoring(scorer, ["mnist"], "experts"):
        raise KeyboardInterrupt
    assert shown(out).endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # the cursor is back, the bar's line empty
    assert scorer.progress is None
