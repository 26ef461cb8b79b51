"""A configuration with callbacks of Lightning is written so that it can be read again, and means the same."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.callbacks import StochasticWeightAveraging, Timer

from safemerge_pl.callbacks import MergeCallback
from safemerge_pl.commands.fit import SafeMergeCLI, build_cli
from safemerge_pl.runtime.configs import config_folder

OTHERS: dict[str, dict[str, Any]] = {
    "DeviceStatsMonitor": {},
    "EarlyStopping": {"monitor": "stream/H", "stopping_threshold": 0.9},
    "GradientAccumulationScheduler": {"scheduling": {0: 1, 4: 2}},
    "LearningRateMonitor": {},
    "ModelCheckpoint": {"train_time_interval": "1:00:00"},
    "ModelSummary": {},
    "StochasticWeightAveraging": {"swa_lrs": [0.1, 0.2]},
}
"""Settings that are unions, mappings, lengths of time, and objects by default."""


def build(monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[SafeMergeCLI, str]:
    """What a command line makes, and the configuration that is saved in the run's folder."""
    monkeypatch.setattr(sys, "argv", ["safemerge", "fit", *args])
    cli = build_cli(run=False)
    return cli, cli._parser("fit").dump(cli.config["fit"], skip_none=False)


# of what Lightning's own command line calls, once a process
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize(
    ("settings", "lasts"),
    [
        ({}, None),
        ({"duration": "00:01:00:00", "interval": "epoch"}, timedelta(hours=1)),
        ({"duration": {"hours": 1, "minutes": 30}}, timedelta(hours=1.5)),
        ({"duration": None}, None),
    ],
)
def test_it_is_read_as_it_was_written(
    settings: dict[str, Any], lasts: timedelta | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given, saved = tmp_path / "given.yaml", tmp_path / "saved.yaml"
    entries = [{"class_path": "SAFEMergeCallback"}] + [
        {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": init_args}
        for name, init_args in {"Timer": settings, **OTHERS}.items()
    ]
    given.write_text(yaml.safe_dump({"trainer": {"callbacks": entries}}))
    tiny = ("--config", str(config_folder() / "tiny.yaml"), "--trainer.logger", "false")
    _, text = build(monkeypatch, *tiny, "--config", str(given), "--merge.keep_ratio", "0.3")
    saved.write_text(text)
    again, repeated = build(monkeypatch, "--config", str(saved))
    assert repeated == text
    merge = MergeCallback.of(again.trainer)
    assert merge is not None
    assert merge.method.settings()["keep_ratio"] == 0.3
    found = {type(each): each for each in again.trainer.callbacks}
    timer, averaging = found[Timer], found[StochasticWeightAveraging]
    assert isinstance(timer, Timer)
    remains = timer.time_remaining()
    assert remains == (None if lasts is None else lasts.total_seconds())
    assert isinstance(averaging, StochasticWeightAveraging)
    assert str(averaging._device) == "cpu"
