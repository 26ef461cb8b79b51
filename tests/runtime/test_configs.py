"""Shipped configurations are found by their bare name."""

import inspect
from pathlib import Path

import pytest

from safemerge_pl import data, study
from safemerge_pl.callbacks import MergeCallback, SAFEMergeCallback
from safemerge_pl.callbacks.options import LiveOptions
from safemerge_pl.commands.fold import fold_once
from safemerge_pl.runtime import configs
from safemerge_pl.runtime.configs import append_repeated, config_folder, resolve_configs


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
    assert resolve_configs(["fit", "--config", "model: {a: 1}"])[2] == "model: {a: 1}"


@pytest.mark.parametrize("name", ["quickstrat.yaml", "quickstrat", "~/quickstart.yml"])
def test_a_configuration_that_is_nowhere_is_refused_with_the_nearest_name(name: str) -> None:
    for arguments in (["--config", name], ["-c", name], [f"--config={name}"]):
        with pytest.raises(ValueError, match=r"there is no configuration .*; did you mean 'quickstart\.yaml'\?"):
            resolve_configs(["fit", *arguments])
        with pytest.raises(ValueError, match=r"There are clip_.*, quickstart\.yaml, .*, tiny\.yaml\."):
            resolve_configs(["fit", *arguments])


def test_a_configuration_that_comes_along_needs_no_ending() -> None:
    assert resolve_configs(["fit", "--config", "quickstart"])[2] == str(config_folder() / "quickstart.yaml")
    assert resolve_configs(["study", "--config=study_methods"])[1].endswith("study_methods.yaml")


def test_a_configuration_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind ``=`` the shell leaves the tilde alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("a: 1")
    assert resolve_configs(["fit", "--config=~/mine.yaml"])[1] == f"--config={tmp_path / 'mine.yaml'}"


def test_every_public_option_that_takes_a_list_appends() -> None:
    """Else of ``--layers a --layers b`` only the last would count, without a word."""
    kinds = [SAFEMergeCallback, MergeCallback, study.Study, study.StudyFigure, fold_once]
    kinds += [getattr(data, name) for name in data.__all__]
    lists = {name for kind in kinds for name, kept in inspect.signature(kind).parameters.items() if _is_list(kept)}
    lists |= {name for name, kept in LiveOptions.__annotations__.items() if "list[" in str(kept)}
    assert lists <= set(configs._LISTS)
    assert {"incoming", "layers", "tasks", "controls", "orders", "sets", "experts"} <= lists


def _is_list(parameter: inspect.Parameter) -> bool:
    return "list[" in str(parameter.annotation).partition("dict[")[0]


def test_an_option_that_is_given_again_is_appended_once() -> None:
    """Also in the processes that DDP starts with the same arguments; a single value is not touched."""
    given = ["fit", "--data.init_args.tasks", "a", "--data.init_args.tasks=b", "--trainer.max_epochs", "1"]
    once = append_repeated(given)
    assert once[3] == "--data.init_args.tasks+=b"
    assert append_repeated(once) == once
    assert append_repeated(["fold", "--layers+", "a", "--layers", "b"])[3] == "--layers+"
    assert append_repeated(["fold", "--layers", "a", "--config", "c", "--config", "d"])[-2] == "--config"


def test_an_installed_package_reads_its_own_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout they lie beside the package, in an installation inside it."""
    package = tmp_path / "safemerge_pl"
    monkeypatch.setattr(configs, "_PACKAGE", package)
    assert config_folder() == tmp_path / "configs"
    (package / "configs").mkdir(parents=True)
    assert config_folder() == package / "configs"


def test_an_option_without_its_value_is_left_to_the_parser() -> None:
    assert resolve_configs(["fit", "--config"]) == ["fit", "--config"]
