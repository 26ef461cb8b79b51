"""A method as a saved merge knows it: built again, or compared with the one that is given."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny import (
    Add,
    fast_method,
    folded,
    tower,
    tuned,
)

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import (
    OPCM,
    TSVM,
    IsoC,
    KnOTSTies,
    MergeMethod,
    SafeMerge,
    Stack,
    StackResult,
    TaskArithmetic,
    TiesMerging,
    WUDIMerging,
)
from safemerge_pl.methods.saved import describe_method, rebuild_method, require_same_method
from safemerge_pl.output.files import STATE_FILE


def test_the_saved_method_is_built_again(tmp_path: Path) -> None:
    out = folded(1, keep_ratio=0.25, seed=7).save(tmp_path / "out")
    assert ContinualMerger.load(out, tower()).method == fast_method(keep_ratio=0.25, seed=7)


def test_other_settings_are_refused_with_every_difference(tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"keep_ratio: 0\.5 then, 0\.25 now; lr: 0\.001 then, 0\.1 now"):
        ContinualMerger.load(out, tower(), method=fast_method(lr=0.1, keep_ratio=0.25))


def test_another_method_is_refused(tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"made with safemerge_pl\.methods\.safe_merge\.SafeMerge, not with .*Add"
    ):
        ContinualMerger.load(out, tower(), method=Add())


@pytest.mark.parametrize("class_path", ["antigravity.fly", "os.system", "safemerge_pl_evil.methods.X", "X"])
def test_a_state_cannot_name_code_to_run(class_path: str, tmp_path: Path) -> None:
    out = folded(1).save(tmp_path / "out")
    state = json.loads((out / STATE_FILE).read_text())
    state["method"]["class_path"] = class_path
    (out / STATE_FILE).write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="pass that method as `method`"):
        ContinualMerger.load(out, tower())
    assert "antigravity" not in sys.modules


def test_a_method_of_ones_own_is_given_again(tmp_path: Path) -> None:
    merger = ContinualMerger(tower(), Add(scaling=0.5))
    merger.fold(tuned(tower(), 1), "a")
    out = merger.save(tmp_path / "out")
    with pytest.raises(CheckpointError, match="pass that method"):
        ContinualMerger.load(out, tower())
    assert ContinualMerger.load(out, tower(), method=Add(scaling=0.5)).fingerprint() == merger.fingerprint()


@dataclass
class Counting(Add):
    """A method with a state of its own."""

    label = "Counting"
    folds: int = field(default=0, init=False)

    def fold_stack(self, stack: Stack) -> StackResult:
        self.folds += 1
        return super().fold_stack(stack)

    def settings(self) -> dict[str, Any]:
        return {"scaling": self.scaling}

    def state_dict(self) -> dict[str, Any]:
        return {"folds": self.folds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.folds = state["folds"]


def test_the_state_of_a_method_is_kept(tmp_path: Path) -> None:
    merger = ContinualMerger(tower(), Counting())
    merger.fold(tuned(tower(), 1), "a")
    out = merger.save(tmp_path / "out")
    method = Counting()
    ContinualMerger.load(out, tower(), method=method)
    assert method.folds == merger.method.state_dict()["folds"] == 2


EVERY = [
    SafeMerge(keep_ratio=0.25),
    TaskArithmetic(0.5),
    TiesMerging(),
    WUDIMerging(),
    IsoC(),
    KnOTSTies(),
    TSVM(),
    OPCM(),
]


@pytest.mark.parametrize("method", EVERY, ids=lambda method: type(method).__name__)
def test_a_method_comes_back_from_strict_json(method: MergeMethod) -> None:
    """As an output keeps it; nothing but its settings makes it what it is."""
    saved = json.loads(json.dumps(describe_method(method), allow_nan=False))
    again = rebuild_method(saved)
    assert type(again) is type(method)
    assert again.settings() == method.settings()
    require_same_method(again, saved)
