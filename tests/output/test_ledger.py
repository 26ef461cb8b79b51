"""The ledger of an output: one line per fold, never rewritten."""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import tiny
from tiny import folded, fresh, tower, tuned

from safemerge_pl import __version__
from safemerge_pl.commands.fold import fold_once
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.output.files import LEDGER_FILE


def strict(line: str) -> dict[str, Any]:
    """Refuses NaN and Infinity, which Python's reader lets pass."""

    def never(constant: str) -> None:
        raise AssertionError(constant)

    content: dict[str, Any] = json.loads(line, parse_constant=never)
    return content


def test_the_ledger_has_one_line_per_fold(tmp_path: Path) -> None:
    """Resolved path and hash, settings, losses, time."""
    expert = tiny.folder_of(tmp_path / "snapshots" / "0123abc", tuned(tower(), 1))
    before = datetime.now(timezone.utc).replace(microsecond=0)
    merger = fresh()
    for task, source in (("one", expert), ("two", tower())):
        merger.fold(source, task)
    lines = (merger.save(tmp_path / "out") / LEDGER_FILE).read_text().splitlines()
    one, two = map(strict, lines)
    report = merger.reports[0]
    assert one["index"] == 1
    assert one["task"] == "one"
    assert one["source"] == str(expert)
    assert one["path"] == str(expert.resolve())
    assert one["revision"] == "0123abc"
    assert (one["incoming"], one["merged"]) == (report.incoming, report.merged)
    assert one["settings"] == merger.method.settings()
    assert (one["loss_first"], one["loss_last"]) == (report.losses[0], report.losses[-1])
    assert one["kept_fraction"] == report.kept_fraction
    assert one["version"] == __version__
    assert before <= datetime.fromisoformat(one["time"]) <= datetime.now(timezone.utc)
    assert two["path"] is None
    assert two["notes"] == ["its merged layers equal the pretrained model's: nothing was added"]


def test_yesterdays_lines_stay_as_they_are(tmp_path: Path) -> None:
    """Also with a remark in them, and through other processes' folds; an output from before the ledger gets one."""
    base = tiny.folder_of(tmp_path / "base", tower(), config={})
    for seed in (1, 2, 3):
        tiny.folder_of(tmp_path / f"task{seed}", tuned(tower(), seed))
    out = str(tmp_path / "out")
    fold_once(str(base), str(tmp_path / "task1"), out)
    file = tmp_path / "out" / LEDGER_FILE
    line = file.read_text().replace('"notes"', '"by": "hand",   "notes"')
    file.write_text(line)
    fold_once(str(base), [str(tmp_path / "task2"), str(tmp_path / "task3")], out, merged=out)
    lines = file.read_text().splitlines(keepends=True)
    assert lines[0] == line
    assert [strict(line)["task"] for line in lines] == ["task1", "task2", "task3"]
    file.unlink()
    merger = ContinualMerger.load(out, base)
    merger.save(out)
    assert file.read_text().splitlines() == merger.ledger
    assert [strict(line)["index"] for line in merger.ledger] == [1, 2, 3]


def test_a_state_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Format 1 as it was before reports knew where and when; and with something that only a later version knows."""
    out = folded(1).save(tmp_path / "out")
    (out / LEDGER_FILE).unlink()
    state = json.loads((out / "merge_state.json").read_text())
    for name in ("path", "revision", "time", "version"):
        del state["reports"][0][name]
    state["reports"][0]["of tomorrow"] = 1
    (out / "merge_state.json").write_text(json.dumps(state))
    merger = ContinualMerger.load(out, tower())
    assert merger.fingerprint() == folded(1).fingerprint()
    merger.save(out)
    assert strict((out / LEDGER_FILE).read_text())["time"] is None
