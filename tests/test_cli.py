"""The command line: its help, its version, its verbs."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import safemerge

from safemerge_pl.cli import VERBS, Verb, main
from safemerge_pl.runtime.configs import config_folder


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys; from safemerge_pl.cli import main; main(['--help']);"
        "sys.exit(int(bool({'torch', 'lightning', 'transformers', 'matplotlib', 'datasets'} & set(sys.modules))))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "safemerge fit" in run.stdout
    assert "quickstart.yaml" in run.stdout


def test_version_and_unknown_verb(tmp_path: Path) -> None:
    assert safemerge("--version", cwd=tmp_path).stdout.strip() == "0.1.0"
    run = safemerge("mrege", cwd=tmp_path)
    assert run.returncode == 2
    assert "there is no verb 'mrege'" in run.stderr


def test_every_verb_is_one_line_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The function that it names exists, and help describes it."""
    main(["--help"])
    text = capsys.readouterr().out
    for name, verb in VERBS.items():
        module, _, function = verb.runs.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
        assert f"safemerge {name}" in text
        assert verb.does in text


def test_a_line_more_is_a_verb_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["safemerge"])
    monkeypatch.setitem(VERBS, "where", Verb("os:getcwd", "", "tell the folder"))
    main(["where", "--config", "tiny.yaml"])
    assert sys.argv == ["safemerge", "where", "--config", str(config_folder() / "tiny.yaml")]
    main([])
    assert "safemerge where" in capsys.readouterr().out


def test_what_a_user_can_mend_is_one_sentence_and_a_bug_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["safemerge"])
    monkeypatch.setitem(sys.modules, "elsewhere", SimpleNamespace(run=fails))  # type: ignore[misc]
    monkeypatch.setitem(VERBS, "where", Verb("elsewhere:run", "", ""))
    error: Exception = ValueError("`lr` must be above 0.")
    with pytest.raises(SystemExit, match="1"):
        main(["where"])
    assert capsys.readouterr().err == "safemerge: `lr` must be above 0.\n"
    error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        main(["where"])
    error = ValueError("mendable")
    monkeypatch.setenv("SAFEMERGE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="mendable"):
        main(["where"])
