"""Ctrl-C and SIGTERM end in one line that says how to go on, whatever a library makes of the interrupt."""

import signal
import sys
from types import SimpleNamespace

import pytest

from safemerge_pl.cli import VERBS, Verb, main
from safemerge_pl.runtime.console import is_quiet
from safemerge_pl.runtime.stopping import catch_stops


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
@pytest.mark.parametrize("exits", [False, True], ids=["raised", "as an exit, as Lightning does"])
def test_a_stop_is_one_line(
    number: signal.Signals, name: str, exits: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            if exits:
                sys.exit(1)
            raise

    monkeypatch.setattr(sys, "argv", ["safemerge"])
    monkeypatch.setitem(sys.modules, "elsewhere", SimpleNamespace(run=run))  # type: ignore[misc]
    monkeypatch.setitem(VERBS, "where", Verb("elsewhere:run", "", "", "go on."))
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        main(["where"])
    assert stopped.value.code == 128 + number
    assert capsys.readouterr().err == f"\nsafemerge: stopped by {name}; go on.\n"
    assert signal.getsignal(number) is before


def test_nothing_is_caught_where_nobody_stops() -> None:
    with catch_stops() as stop:
        pass
    assert stop.number is None


def test_a_quiet_verb_prints_nothing_but_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        print("done", is_quiet())
        print("a problem", file=sys.stderr)

    monkeypatch.setattr(sys, "argv", ["safemerge"])
    monkeypatch.setitem(sys.modules, "elsewhere", SimpleNamespace(run=run))  # type: ignore[misc]
    monkeypatch.setitem(VERBS, "where", Verb("elsewhere:run", "", ""))
    for flag in ("-q", "--quiet"):
        main(["where", flag])
        assert capsys.readouterr() == ("", "a problem\n")
        assert sys.argv == ["safemerge", "where"]
    assert not is_quiet()
    main(["where"])
    assert capsys.readouterr().out == "done False\n"
