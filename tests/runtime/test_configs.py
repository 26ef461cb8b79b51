"""Shipped configurations are found by their bare name."""

from pathlib import Path

import pytest

from safemerge_pl.runtime import configs
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


def test_an_installed_package_reads_its_own_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout they lie beside the package, in an installation inside it."""
    package = tmp_path / "safemerge_pl"
    monkeypatch.setattr(configs, "_PACKAGE", package)
    assert config_folder() == tmp_path / "configs"
    (package / "configs").mkdir(parents=True)
    assert config_folder() == package / "configs"


def test_an_option_without_its_value_is_left_to_the_parser() -> None:
    assert resolve_configs(["fit", "--config"]) == ["fit", "--config"]
