"""What a shell or a person hands to a verb: home folders, repeated options, odd names, names that are nearly right."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from command_line import QUICK, safemerge
from jsonargparse import Namespace
from safetensors.torch import load_file
from tiny import fresh, tower, tuned

from safemerge_pl.callbacks import MergeCallback, MergedModelWriter
from safemerge_pl.callbacks.report import run_folder
from safemerge_pl.cli import main
from safemerge_pl.commands.fit import expand_home
from safemerge_pl.commands.fold import fold_once
from safemerge_pl.live import LiveMerger
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.runtime.files import local_path

STEPS = ["--method", "SafeMerge", "--method.num_steps", "2"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with models, and another folder as the current one."""
    (tmp_path / "here").mkdir()
    folder = tmp_path / "home"
    tiny.folder_of(folder / "base", tower(), config={})
    for seed, name in ((1, "a"), (2, "b"), (3, "c"), (4, "\u6a21\u578b")):
        tiny.folder_of(folder / name, tuned(tower(), seed))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", ["safemerge"])
    return folder


def tasks_of(folder: Path) -> list[str]:
    tasks: list[str] = json.loads((folder / "merge_state.json").read_text())["tasks"]
    return tasks


# home folders


def test_every_path_of_a_fold_may_start_with_a_tilde(home: Path) -> None:
    main(["fold", "--pretrained=~/base", "--incoming=~/a", "--output=~/merged", *STEPS])
    main(["fold", "--pretrained=~/base", "--incoming=[~/b]", "--merged=~/merged", "--output=~/merged"])
    (home / "mine.yaml").write_text("pretrained: ~/base\nincoming: ~/c\nmerged: ~/merged\noutput: ~/next\n")
    main(["fold", "--config=~/mine.yaml"])
    assert tasks_of(home / "merged") == ["a", "b"]
    assert tasks_of(home / "next") == ["a", "b", "c"]
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "~/base"}, "is or lies inside the input"),
        ({"output": "~/a/out"}, "is or lies inside the input"),
        ({"output": "~nobody-of-this-name/out"}, "~nobody-of-this-name names no home folder"),
        ({"incoming": "~/gone"}, "~/gone does not exist"),
    ],
)
def test_a_tilde_hides_no_mistake(options: dict[str, str], message: str, home: Path) -> None:
    """An output in an input was not seen to be one."""
    with pytest.raises(ValueError, match=message):
        fold_once(**({"pretrained": "~/base", "incoming": "~/a", "output": "~/out"} | options))  # type: ignore[arg-type]
    assert not list(Path().iterdir())


def test_in_python_too(home: Path) -> None:
    merger = ContinualMerger("~/base", tiny.fast_method(), workspace="~/work")
    merger.fold("~/a", "a")
    assert merger.save("~/out", template="~/base") == home / "out"
    assert json.loads(merger.ledger[0])["path"] == str(home / "a")
    again = ContinualMerger.load("~/out", "~/base")
    again.restore("~/out")
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    live = LiveMerger(module, layers=["*weight"])
    live.fold_trained("one")
    live.save("~/live")
    assert LiveMerger.load("~/live", module, layers=["*weight"]).tasks == ["one"]
    assert not list(Path().iterdir())


def test_outputs_of_callbacks_lie_in_the_home_folder(home: Path) -> None:
    class Trainer:
        log_dir, loggers, default_root_dir = None, (), "."

    trainer: Any = Trainer()
    assert MergedModelWriter(folder="~/merged")._folder(trainer) == home / "merged"
    assert run_folder(trainer, "~/report") == home / "report"
    assert MergeCallback(epochs_per_task=1, output="~/x").live is not None


def test_every_string_of_a_configuration_that_starts_with_a_tilde_is_expanded(home: Path) -> None:
    """Also of loggers, which do not do it themselves; hub ids and what has a tilde elsewhere stay."""
    config = Namespace(a=Namespace(save_dir="~/runs", n=1), b=[{"c": "~/x"}, "~/y", "a/~/b"], d="owner/name", e="~")
    expand_home(config)
    assert config.a.save_dir == str(home / "runs")
    assert config.b == [{"c": str(home / "x")}, str(home / "y"), "a/~/b"]
    assert (config.d, config.e) == ("owner/name", "~")


def test_a_folder_that_has_a_tilde_in_its_name_is_itself(home: Path) -> None:
    Path("~backup").mkdir()
    assert local_path("~backup/x") == Path("~backup/x")
    assert local_path("./~/x") == Path("./~/x")
    assert local_path("~") == home


# options given several times


@pytest.mark.parametrize(
    ("given", "tasks"),
    [
        (["--incoming", "~/a", "--incoming", "~/b"], ["a", "b"]),
        (["--incoming=~/b", "--incoming=~/a", "--incoming", "~/c"], ["b", "a", "c"]),
        (["--incoming", "[~/a,~/b]", "--incoming", "~/c"], ["a", "b", "c"]),
        (["--incoming", "~/a", "--incoming+", "~/b"], ["a", "b"]),
        (["--incoming", "~/a", "--incoming", "~/b", "--task", "x", "--task", "y"], ["x", "y"]),
        (["--incoming", "~/a", "--layers", "*.fc1.weight", "--layers", "*.q_proj.weight"], ["a"]),
        (["--incoming", "~/a", "--layers", "*.fc1.weight"], ["a"]),
        (["--incoming", "~/a", "--dtype", "float32", "--dtype", "bfloat16"], ["a"]),
    ],
)
def test_repeated_options_of_a_fold_append(given: list[str], tasks: list[str], home: Path) -> None:
    main(["fold", "--pretrained=~/base", "--output=out", *given, *STEPS])
    assert tasks_of(Path("out")) == tasks
    if "--layers" in given:
        kinds = {name.split(".")[-2] for name in load_file("out/merge_master.safetensors")}
        assert kinds == ({"fc1", "q_proj"} if given.count("--layers") == 2 else {"fc1"})


# consoles


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_fold_is_done_whatever_the_console_shows(encoding: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result is one line, with the name in escapes; another run of it would be refused."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    monkeypatch.setattr(sys, "stdout", out)
    main(["fold", "--pretrained=~/base", "--incoming=~/\u6a21\u578b", "--output=\u6a21", *STEPS])
    out.flush()
    assert b"folded '\\u6a21\\u578b' as task 1" in out.buffer.getvalue()
    assert tasks_of(Path("\u6a21")) == ["\u6a21\u578b"]


def test_a_name_that_is_no_text_does_not_stop_a_merge(home: Path) -> None:
    """Bytes of another encoding in a file name; they stand in the card, which is UTF-8."""
    merger = fresh("~/base")
    merger.fold(tuned(tower(), 1), "caf\udce9")
    out = merger.save("out")
    assert "caf\\udce9" in (out / "README.md").read_text(encoding="utf-8")


# names that are nearly right


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["fodl"], 2, "there is no verb 'fodl'; did you mean 'fold'?"),
        (["chekc"], 2, "there is no verb 'chekc'; did you mean 'check'?"),
        (["merge"], 2, "there is no verb 'merge'; use one of fit"),
        (["fit", "--config", "quickstrat"], 1, "did you mean 'quickstart.yaml'?"),
        (["study", "--config=study_method.yaml"], 1, "did you mean 'study_methods.yaml'?"),
        (["fold", "--pretrained=a", "--incoming=b", "--outptu=c"], 2, "Did you mean '--output'"),
        (
            ["fold", "--pretrained=a", "--incoming=b", "--output=c", *STEPS, "--method.keep_ratoi", "1"],
            2,
            "Did you mean 'keep_ratio' by 'keep_ratoi'?",
        ),
        (
            ["fold", "--pretrained=a", "--incoming=b", "--output=c", "--method", "SafeMergee"],
            2,
            "Did you mean 'SafeMerge' by 'SafeMergee'?",
        ),
    ],
)
def test_a_wrong_name_is_an_error_with_the_right_one(
    arguments: list[str], code: int, message: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == code
    assert message in capsys.readouterr().err


# check and fit


def test_check_takes_what_fit_takes_and_what_it_wrote(tmp_path: Path) -> None:
    """The configuration that it prints, options of the run itself, and the file that a run saves beside its results."""
    printed = safemerge("fit", "--config", "tiny.yaml", *QUICK, "--print_config", cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    assert "ckpt_path" in yaml.safe_load(printed.stdout)
    (tmp_path / "mine.yaml").write_text(printed.stdout)
    ours = ["--data.init_args.tasks", "flags", "--data.init_args.tasks", "mnist"]
    for arguments, tasks in (
        (["--config", "mine.yaml"], "font_category, weather"),
        (["--config", "tiny.yaml", *QUICK, "--ckpt_path", "last"], "font_category, weather"),
        (["--config", "mine.yaml", *ours], "flags, mnist"),
    ):
        run = safemerge("check", *arguments, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert f"2 tasks: {tasks}" in run.stdout
        assert run.stdout.splitlines()[-1] == "no problem found"
    wrong = safemerge("check", "--config", "mine.yaml", "--trainer.callbacks.init_args.metrics", "a", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "Did you mean 'metric' by 'metrics'?" in wrong.stderr
    assert not (tmp_path / "runs").exists()
