"""Shell completion: what a real shell offers when Tab is pressed."""

import inspect
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from safemerge_pl.callbacks import SAFEMergeCallback
from safemerge_pl.callbacks.options import LiveOptions
from safemerge_pl.cli import VERBS, main
from safemerge_pl.commands import fold
from safemerge_pl.commands.completion import completion_script, list_verbs
from safemerge_pl.methods import MergeMethod
from safemerge_pl.runtime.classes import subclasses
from safemerge_pl.runtime.configs import packaged_configs

PRESS = """
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
"$(complete -p safemerge | grep -o '_shtab_[a-z]*')"
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does when Tab is pressed after the last word."""

STUDIES = [name for name in packaged_configs() if name.startswith("study")]
STREAMS = [name for name in packaged_configs() if name not in STUDIES]
MERGE = [*(set(inspect.signature(SAFEMergeCallback).parameters) - {"live"}), *LiveOptions.__annotations__]

script = cache(completion_script)


def find(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"there is no {shell} here")
    return found


@pytest.fixture
def offered(tmp_path: Path) -> Callable[[str], list[str]]:
    """Words that bash offers for the last one of a command line, in a folder with a file of our own."""
    bash, file = find("bash"), tmp_path / "script"
    file.write_text(script("bash"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine.yaml").touch()

    def press(line: str) -> list[str]:
        command = [bash, "--norc", "-c", PRESS, "bash", str(file), "safemerge", *line.split(" ")]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        assert run.stderr == ""
        return sorted(run.stdout.split())

    return press


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", list(VERBS)),
        ("fi", ["fit"]),
        ("-", ["-h", "--help", "-q", "--quiet", "--version"]),
        ("fit --merge.", [f"--merge.{name}" for name in MERGE]),
        ("-q fit -c quickstart.yaml --merge.ke", ["--merge.keep", "--merge.keep_ratio"]),
        ("fit -q --merge.keep_ratio 0.3 --data.order", ["--data.order_seed"]),
        ("fit --merge.keep ", ["low", "high"]),
        ("fit --merge.max_response ", ["auto", "null"]),
        ("fit --data Zoo", ["ZooData"]),
        ("fit --data.help", ["--data.help"]),
        ("fit --trainer.callbacks.mon", ["--trainer.callbacks.monitor"]),
        ("fit --trainer.callbacks Ti", ["Timer"]),
        ("fit --print_config --seed", ["--seed_everything"]),
        ("fit --config ", [*STREAMS, "mine.yaml"]),
        ("check -c mi", ["mine.yaml"]),
        ("study --config ", [*STUDIES, "mine.yaml"]),
        ("fold --config ", ["mine.yaml"]),
        ("fold --keep", ["--keep", "--keep_ratio"]),
        ("fold --method OP", ["OPCM"]),
        ("fold --method.alp", ["--method.alpha"]),
        ("fit --ckpt_path ", ["last", "mine.yaml"]),
        ("config ", packaged_configs()),
        ("completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_bash_offers(line: str, words: list[str], offered: Callable[[str], list[str]]) -> None:
    assert offered(line) == sorted(words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fit --merge.ke", ["--merge.keep", "--merge.keep_ratio"]),
        ("fit --config qui", ["quickstart.yaml"]),
        ("config tin", ["tiny.yaml"]),
        ("fold --method OP", ["OPCM"]),
    ],
)
def test_fish_offers(line: str, words: list[str], tmp_path: Path) -> None:
    fish = find("fish")
    (tmp_path / "script").write_text(script("fish"))
    command = [fish, "-c", f"source script; complete -C 'safemerge {line}'"]
    env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert [told.partition("\t")[0] for told in run.stdout.splitlines()] == words


def test_zsh_takes_the_script(tmp_path: Path) -> None:
    """It is registered, and its options are those of the verbs; pressing Tab needs a terminal."""
    zsh = find("zsh")
    (tmp_path / "script").write_text(script("zsh"))
    code = 'autoload -Uz compinit; compinit -u -D; eval "$(cat script)"; print $_comps[safemerge]; print -l -- '
    code += "$_shtab_safemerge_config_options $_shtab_safemerge_fit_options"
    run = subprocess.run([zsh, "-fc", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    registered, *options = run.stdout.splitlines()
    assert registered == "_shtab_safemerge"
    assert any(f"({' '.join(packaged_configs())})" in option for option in options)
    assert all(any(option.startswith(f"--merge.{name}[") for option in options) for name in MERGE)


def test_every_verb_is_completed() -> None:
    assert set(list_verbs()) == set(VERBS)
    assert all(does for does, _ in list_verbs().values())


def test_a_parser_takes_the_words_that_are_offered() -> None:
    needed = ["--pretrained", "a", "--incoming", "b", "--output", "c"]
    parser = fold.make_parser()
    of_tests = {kind.__name__ for kind in subclasses(MergeMethod) if not kind.__module__.startswith("safemerge_pl.")}
    taken = [
        parser.parse_args([*needed, option.names[0], word])
        for option in list_verbs()["fold"][1]
        if option.words and option.names[0] in parser._option_string_actions and ".help" not in option.names[0]
        for word in option.words
        if word not in of_tests
    ]
    assert len(taken) > 20


def test_the_script_is_for_the_shell_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["safemerge"])
    monkeypatch.setattr("safemerge_pl.commands.completion.completion_script", "for {}".format)
    for own, given, shell in [("/bin/zsh", [], "zsh"), ("/bin/csh", [], "bash"), ("/bin/zsh", ["fish"], "fish")]:
        monkeypatch.setenv("SHELL", own)
        main(["completion", *given])
        assert capsys.readouterr().out == f"for {shell}\n"
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "bsh"])
    assert "must be bash or zsh or fish, got 'bsh'." in capsys.readouterr().err
