"""Settings of the merge callback in a section of their own, beside whatever other callbacks."""

import inspect
import re
import sys
from typing import Any

import pytest
from jsonargparse import ArgumentParser, Namespace

from safemerge_pl.callbacks import MergeCallback, SAFEMergeCallback
from safemerge_pl.commands.fit import build_cli
from safemerge_pl.commands.merge_section import add_merge_section, take_merge_section
from safemerge_pl.runtime.configs import config_folder

OTHER = Namespace(class_path="lightning.pytorch.callbacks.LearningRateMonitor", init_args=Namespace())
OURS = "safemerge_pl.callbacks.SAFEMergeCallback"


def entry(**settings: Any) -> Namespace:
    return Namespace(class_path=OURS, init_args=Namespace(**settings))


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        ([entry(keep_ratio=0.5, lr=1.0), OTHER], [entry(keep_ratio=0.3, lr=1.0), OTHER]),
        ([OTHER, entry(lr=1.0)], [OTHER, entry(lr=1.0, keep_ratio=0.3)]),
        (entry(keep_ratio=0.5), [entry(keep_ratio=0.3)]),
    ],
)
def test_it_goes_into_the_merge_callback_wherever_it_stands(callbacks: Any, expected: list[Namespace]) -> None:
    config = Namespace(trainer=Namespace(callbacks=callbacks), merge=Namespace(keep_ratio=0.3))
    take_merge_section(config)
    assert config.trainer.callbacks == expected
    assert "merge" not in config


@pytest.mark.parametrize("callbacks", [None, [OTHER]])
def test_without_a_merge_callback_there_is_one_now(callbacks: Any) -> None:
    config = Namespace(trainer=Namespace(callbacks=callbacks), merge=Namespace(keep_ratio=0.3))
    take_merge_section(config)
    *others, added = config.trainer.callbacks
    assert others == (callbacks or [])
    assert added.init_args == Namespace(keep_ratio=0.3)
    assert added.class_path.endswith("SAFEMergeCallback")


def test_what_is_not_given_changes_nothing() -> None:
    config = Namespace(trainer=Namespace(callbacks=[entry(lr=1.0)]))
    take_merge_section(config)
    assert config.trainer.callbacks == [entry(lr=1.0)]


def test_help_shows_defaults_that_are_not_set() -> None:
    """Those of the callback, as for every other option."""
    parser = ArgumentParser()
    add_merge_section(parser)
    told = " ".join(parser.format_help().split())
    parts = dict(
        re.findall(r"--merge\.(\w+)(?:, --merge\.\w+\+)? [^-].*? \(type: ([^()]*)\)", told[told.index("Fold one") :])
    )
    assert parts["keep_ratio"] == "float, default: 0.5"
    assert parts["module_attr"].endswith("default: null")
    assert "default" not in parts["epochs_per_task"]  # without it nothing is merged in a loop
    for name, parameter in inspect.signature(SAFEMergeCallback).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.default is not None:
            assert parts[name].endswith(f", default: {parameter.default}")
    assert parser.parse_args([]) == Namespace()


# of what Lightning's own command line calls, once a process
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--merge.keep_ratio", "0.3", "--merge.max_response", "null", "--trainer.logger", "false"]
    monkeypatch.setattr(sys, "argv", ["safemerge", "fit", "--config", str(config_folder() / "tiny.yaml"), *given])
    cli = build_cli(run=False)
    merge = MergeCallback.of(cli.trainer)
    assert merge is not None
    assert (merge.method.settings()["keep_ratio"], merge.part.max_response) == (0.3, None)
    assert merge.method.settings()["num_steps"] == 10  # of the configuration
