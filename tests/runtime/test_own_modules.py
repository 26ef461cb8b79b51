"""A method of one's own in a file beside the configuration."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from safemerge_pl.cli import main
from safemerge_pl.runtime.own_modules import find_modules_beside

METHOD = """
from dataclasses import dataclass
from typing import ClassVar

from safemerge_pl.methods import MergeMethod, Stack, StackResult


@dataclass
class HalfWay(MergeMethod):
    label: ClassVar[str] = "Half way"
    share: float = 0.5

    def fold_stack(self, stack: Stack) -> StackResult:
        return StackResult(stack.merged + self.share * (stack.incoming - stack.merged))
"""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The import system of the other tests."""
    finders, modules, paths = list(sys.meta_path), set(sys.modules), list(sys.path)
    yield
    sys.meta_path[:], sys.path[:] = finders, paths
    for name in set(sys.modules) - modules:
        if name.startswith("my_own_"):
            del sys.modules[name]


@pytest.mark.parametrize("by_option", [False, True])
def test_a_method_beside_the_configuration(
    by_option: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "my_own_method.py").write_text(METHOD)
    base = tiny.folder_of(tmp_path / "base", tiny.tower(), config={})
    tiny.folder_of(tmp_path / "task", tiny.tuned(tiny.tower(), 1))
    method = "method: {class_path: my_own_method.HalfWay, init_args: {share: 0.25}}"
    (here / "fold.yaml").write_text(f"pretrained: {base}\nincoming: {tmp_path / 'task'}\n{'' if by_option else method}")
    monkeypatch.chdir(here if by_option else tmp_path)
    options = ["--method", "my_own_method.HalfWay"] if by_option else []
    main(["fold", "--config", str(here / "fold.yaml"), "--output", str(tmp_path / "out"), *options])
    assert "Half way: folded 'task' as task 1" in capsys.readouterr().out


def test_only_what_is_named_and_only_where_nobody_else_has_it(tmp_path: Path) -> None:
    """Files beside a configuration offer nothing to libraries that try an import, and hide no module."""
    for name in ("my_own_named", "my_own_other", "json", "my_own_hidden"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "my_own_package").mkdir()
    (tmp_path / "my_own_package" / "__init__.py").write_text("")
    (tmp_path / "my_own_package" / "inner.py").write_text("x = 2\n")
    config = tmp_path / "run.yaml"
    config.write_text(
        "a: {class_path: my_own_named.A}\nb:\n  class_path: 'my_own_package.inner.B'\nc: {class_path: json.C}\n"
        "d: my_own_hidden.D\n"
    )
    paths = list(sys.path)
    find_modules_beside(["safemerge", "fit", "--config", str(config), "--data", "my_own_gone.Data"])
    assert sys.path == paths
    assert importlib.import_module("my_own_named").x == 1
    assert importlib.import_module("my_own_package.inner").x == 2
    assert not hasattr(importlib.reload(importlib.import_module("json")), "x")
    for name in ("my_own_other", "my_own_hidden", "my_own_gone"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_nothing_to_find_changes_nothing(tmp_path: Path) -> None:
    before = list(sys.meta_path)
    find_modules_beside(["safemerge", "fold", "--config", str(tmp_path / "gone.yaml"), "--method", "OPCM"])
    find_modules_beside(["safemerge", "fit", "--config={a: 1}", "-c"])
    assert sys.meta_path == before
