"""Names that a console cannot show."""

import io
import sys
from typing import Any

import pytest
from terminals import Terminal, console, shown

from safemerge_pl.callbacks.progress import StreamProgress
from safemerge_pl.runtime import progress
from safemerge_pl.runtime.console import Tolerant, fit_line, say, terminal_width, tolerate_names
from safemerge_pl.runtime.progress import FoldProgress

NAME = "\u6a21\u578b"
BYTES = "caf\udce9"  # a file name in Latin-1, as Python reads it on a system in UTF-8


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("name", [NAME, BYTES, "\U0001f600"])
def test_any_name_is_printed_in_some_form(encoding: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = console(encoding), console(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    say(f"task {name}", 3)
    say(f"error {name}", error=True)
    tolerate_names()
    print(name)
    assert shown(out).startswith("task ")
    assert shown(out).count("\n") == 2
    assert shown(err).startswith("error ")


def test_what_a_console_can_show_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, name in (("utf-8", NAME), ("cp1252", "caf\u00e9")):
        out = console(encoding)
        monkeypatch.setattr(sys, "stdout", out)
        tolerate_names()
        say(name)
        assert shown(out) == f"{name}\n"


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_a_process_without_a_console_prints_nothing_and_goes_on(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    tolerate_names()
    say(NAME)


@pytest.mark.parametrize("kind", [io.TextIOWrapper, Terminal])
def test_the_progress_of_a_fold_passes_on_any_console(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line in a log, a bar on a terminal."""
    err = console("ascii", kind)
    monkeypatch.setattr(sys, "stderr", err)
    with FoldProgress(after=0.0, every=0.0) as told:
        for done in (0, 1, 2, 3):
            told(NAME, done, 4)
        told(NAME, 4, 4)
    assert "\\u6a21" in shown(err)
    assert isinstance(progress.Tolerant(err), Tolerant)


@pytest.mark.parametrize("kind", [io.TextIOWrapper, Terminal])
def test_the_lines_of_a_stream_pass_on_any_console(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = console("cp1252", kind)
    monkeypatch.setattr(sys, "stdout", out)
    bar: Any = StreamProgress()
    bar._open(3)
    bar.print(f"1/2 {NAME}")
    bar._advance()
    bar._close()
    assert "1/2" in shown(out)


LINE = "      note: only 34% of its change lies in the leading directions of /home/somebody/a/very/long/path/of/a/model"


@pytest.mark.parametrize("kind", [io.TextIOWrapper, Terminal])
@pytest.mark.parametrize("columns", [None, "40"])
def test_a_long_line_is_broken_between_words_where_the_width_is_known(
    kind: Any, columns: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log has no width of its own, so that it can be searched by lines."""
    out, bar = console("utf-8", kind), StreamProgress()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    width = terminal_width()
    assert width == (40 if columns else None if kind is io.TextIOWrapper else width)
    bar.print(LINE)
    *lines, path = shown(out).splitlines()
    if width is None or width >= len(LINE):
        assert (lines, path) == ([], LINE)
        return
    assert path.strip() == LINE.split()[-1]  # whole, though it is longer than a line
    assert max(map(len, lines)) <= width
    assert [len(line) - len(line.lstrip()) for line in (*lines, path)] == [6, *[8] * len(lines)]
    assert " ".join("".join(shown(out)).split()) == LINE.strip()


def test_what_belongs_together_stands_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    line = "  1/8 mnist  acc 50.0  (fold\xa01\xa0s,\xa0score\xa02\xa0s)"
    assert fit_line(line) == "  1/8 mnist  acc 50.0\n    (fold 1 s, score 2 s)"
    monkeypatch.setenv("COLUMNS", "80")
    assert fit_line(line) == "  1/8 mnist  acc 50.0  (fold 1 s, score 2 s)"
