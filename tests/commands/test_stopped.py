"""A run that is stopped says how to go on."""

from pathlib import Path

import pytest
from command_line import QUICK

from safemerge_pl.cli import main

STOPS = """
import signal
from lightning.pytorch.callbacks import Callback

class StopsAfter(Callback):
    def __init__(self, tasks: int):
        self.tasks = tasks

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == self.tasks:
            signal.raise_signal(signal.SIGINT)
"""


# of what Lightning's own command line calls, once a process
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_it_goes_on_from_a_checkpoint_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first task is whole, after it, and before it where an earlier run of this name has left some."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["safemerge"])
    (tmp_path / "stops.py").write_text(STOPS)
    fit = ["fit", "--config", "tiny.yaml", *QUICK, "--trainer.limit_val_batches", "1"]
    for tasks, advice in [
        (0, "repeat the command."),
        (1, "repeat the command with --ckpt_path last to go on after the last whole task."),
        (0, "repeat the command."),
    ]:
        stops = ["--trainer.callbacks+", "stops.StopsAfter", "--trainer.callbacks.tasks", str(tasks)]
        with pytest.raises(SystemExit) as stopped:
            main([*fit, *stops])
        assert stopped.value.code == 130
        assert capsys.readouterr().err.splitlines()[-1] == f"safemerge: stopped by Ctrl-C; {advice}"
