"""``fold`` as a person uses it: in a process of its own, reading what it prints."""

import json
from pathlib import Path

import pytest
from command_line import safemerge

from safemerge_pl.runtime.configs import config_folder

ZOO = config_folder().parent / "safemerge_pl" / "zoo" / "files"


def test_fold_today_and_tomorrow(tmp_path: Path) -> None:
    """One model a day on the command line ends with the bits of one run in Python."""
    from safemerge_pl.merger import ContinualMerger
    from safemerge_pl.methods import OPCM

    base = ["fold", "--pretrained", str(ZOO / "model"), "--output", "out"]
    first = safemerge(
        *base, "--incoming", str(ZOO / "experts/mnist"), "--method", "OPCM", "--method.alpha", "0.4", cwd=tmp_path
    )
    assert first.returncode == 0, first.stderr
    assert "folded 'mnist' as task 1" in first.stdout
    again = safemerge(*base, "--incoming", str(ZOO / "experts/flags"), cwd=tmp_path)
    assert again.returncode == 1
    assert "continue it with --merged out" in again.stderr
    flags = ["--incoming", str(ZOO / "experts/flags"), "--merged", "out", "--task", "Flags", "--dtype", "float32"]
    second = safemerge(*base, *flags, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    merger = ContinualMerger(ZOO / "model", OPCM(alpha=0.4))
    for task in ("mnist", "flags"):
        merger.fold(ZOO / "experts" / task, task)
    state = json.loads((tmp_path / "out" / "merge_state.json").read_text())
    assert state["merged"] == merger.fingerprint()
    assert state["tasks"] == ["mnist", "Flags"]
    assert state["method"]["init_args"] == {"alpha": 0.4, "zero_diagonal": False}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--incoming", "gone"], "gone does not exist."),
        (["--incoming", "EXPERT", "--merged", "gone"], "gone holds no merge_state.json"),
        (["--incoming", "EXPERT", "--method.keep_ratio", "2"], "`keep_ratio` must be in [0, 1]"),
        (["--incoming", "EXPERT", "--layers", "[text_model.*]"], "matches none of the"),
        (["--incoming", "MODEL/tokenizer.json"], "tokenizer.json is not a checkpoint"),
    ],
)
def test_fold_refuses_in_one_sentence(args: list[str], message: str, tmp_path: Path) -> None:
    places = {"EXPERT": str(ZOO / "experts/mnist"), "MODEL/tokenizer.json": str(ZOO / "model/tokenizer.json")}
    given = [places.get(argument, argument) for argument in args]
    run = safemerge("fold", "--pretrained", str(ZOO / "model"), "--output", "out", *given, cwd=tmp_path)
    assert run.returncode in (1, 2), run.stdout
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []
