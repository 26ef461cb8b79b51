"""``check``: every problem at once, in seconds."""

from pathlib import Path

from command_line import safemerge

MERGE = "--trainer.callbacks.init_args."


def test_check_lists_every_problem_at_once(tmp_path: Path) -> None:
    args = [MERGE + "experts", '{"weather": "gone", "clipart_category": "also/gone/now"}']
    run = safemerge("check", "--config", "tiny.yaml", *args, cwd=tmp_path)
    assert run.returncode == 1
    assert "task 'weather': gone does not exist." in run.stderr
    assert "task 'clipart_category': also/gone/now does not exist." in run.stderr
    assert "2 problems found" in run.stderr
