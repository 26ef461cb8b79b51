"""Configurations that come along, by their bare names."""

from pathlib import Path

import pytest

from safemerge_pl.runtime.configs import config_folder, resolve_configs


def test_a_local_config_wins_over_the_packaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = str(config_folder() / "tiny.yaml")
    assert resolve_configs(["fit", "--config=tiny.yaml", "-c", "tiny.yaml"]) == [
        "fit",
        f"--config={packaged}",
        "-c",
        packaged,
    ]
    Path("tiny.yaml").write_text("mine: 1")
    assert resolve_configs(["fit", "--config", "tiny.yaml"])[2] == "tiny.yaml"
    assert resolve_configs(["fit", "--config", "none.yaml"])[2] == "none.yaml"
