"""What an output holds, told from the folder alone, and whether it is still what was written."""

from pathlib import Path

import pytest
import tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from safemerge_pl.cli import main
from safemerge_pl.commands.info import describe_output
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, MergeMethod, TaskArithmetic
from safemerge_pl.zoo import FILES


def merge_in(folder: Path, method: MergeMethod, **options: object) -> Path:
    merger = ContinualMerger(tiny.tower(), method, **options)  # type: ignore[arg-type]
    for seed, task in ((1, "one"), (2, "two")):
        merger.fold(tiny.tuned(tiny.tower(), seed), task)
    return merger.save(folder)


@pytest.mark.parametrize("method", [tiny.fast_method(), OPCM(), TaskArithmetic()], ids=lambda method: method.label)
def test_a_whole_output_matches(method: MergeMethod, tmp_path: Path) -> None:
    lines, whole = describe_output(merge_in(tmp_path / "out", method))
    text = "\n".join(lines)
    assert whole
    assert f"2 tasks, {type(method).__name__}(" in text
    assert "  1  one  from " in text
    assert "of the squared task vector merged" in text
    assert "as the state says" in text
    assert "weights: equal the masters" in text


@pytest.mark.parametrize("file", ["model.safetensors", "merge_master.safetensors"])
def test_what_was_changed_since_is_seen(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = merge_in(tmp_path / "out", tiny.fast_method())
    with safe_open(out / file, "pt") as opened:
        kept = opened.metadata()
    tensors = load_file(out / file)
    tensors[tiny.FC1][0, 0] += 1
    save_file(tensors, out / file, metadata=kept)
    with pytest.raises(SystemExit) as stopped:
        main(["info", str(out)])
    assert stopped.value.code == 1
    assert "NOT the" in capsys.readouterr().out


def test_a_bounded_merge_and_a_folder_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, whole = describe_output(merge_in(tmp_path / "out", tiny.fast_method(), max_response=1e-4))
    assert whole
    assert any("of the accumulated vector is deployed" in line for line in lines)
    for arguments, message in (
        (["info", str(tmp_path)], "holds no merge_state.json"),
        (["info"], "it needs FOLDER."),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


def test_lines_fit_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a fold says of itself as well; words are never broken, so that a path or a hash can be copied."""
    monkeypatch.setenv("COLUMNS", "60")
    fold = ["fold", "--pretrained", str(FILES / "model"), "--incoming", str(FILES / "experts/mnist")]
    for arguments in (
        [*fold, "--output", str(tmp_path), "--method.scoring_rank", "21", "--max_response", "0.01"],
        ["info", str(tmp_path)],
    ):
        main(arguments)
        lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("merged model: ")]
        assert any(line.startswith("  ") for line in lines), "nothing was too long"
        assert [line for line in lines if len(line) > 60 and len(line.split()) > 1] == []
