"""What a run was made with."""

import pytest
import torch

from safemerge_pl.runtime import environment as environment_module
from safemerge_pl.runtime.environment import environment, machine_key
from safemerge_pl.version import __version__


def test_the_environment_is_plain_and_names_the_versions() -> None:
    found = environment()
    assert found["torch"] == torch.__version__.split("+")[0]
    assert {"python", "platform", "safemerge_pl", "lightning", "transformers", "cpus"} <= set(found)
    assert all(type(value) is str for value in found.values())


def test_a_package_that_is_missing_is_named_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_module, "_PACKAGES", ("torch", "no-such-package"))
    found = environment()
    assert found["no-such-package"] == "not installed"
    assert found["torch"] != "not installed"


def test_the_machine_key_keeps_its_form() -> None:
    """It is part of the names of files on disk: another form would leave all of them unused."""
    assert machine_key(torch.device("cpu")) == [
        torch.backends.cpu.get_cpu_capability(),
        torch.__version__,
        __version__,
    ]
