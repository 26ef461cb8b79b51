"""A fold is whole or has not happened, in memory too: it is interrupted at every line."""

import copy
import json
import math
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tiny import Add, tower, tuned

from safemerge_pl import merger as merger_module
from safemerge_pl.folding import bound, engine
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, MergeMethod, SafeShare

FILES = {str(Path(module.__file__ or "")) for module in (merger_module, engine, bound)}


@contextmanager
def interrupted_at(line: int, error: type[BaseException]) -> Any:
    """Raise an error before the given line of our own files runs, counted over everything inside of the block."""
    count, last = 0, (0, 0)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count, last
        if frame.f_code.co_filename not in FILES:
            return None
        # Python 3.12 and 3.13 report each turn of a comprehension as a line, and pass over the handlers of an error
        # that is raised just then; only a tracer can raise there
        again, last = last == (id(frame), frame.f_lineno), (id(frame), frame.f_lineno)
        if event == "line" and not again:
            count += 1
            if count == line:
                raise error("interrupted")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)


def state_of(merger: ContinualMerger) -> dict[str, Any]:
    return {
        "tasks": merger.tasks,
        "ledger": [json.loads(line)["task"] for line in merger.ledger],
        "fingerprint": merger.fingerprint(),
        "weights": {name: tensor.tolist() for name, tensor in merger.merged.items()},
        "method": copy.deepcopy(merger.method.state_dict()),
        "scale": merger.scale,
    }


METHODS: dict[str, Callable[[], MergeMethod]] = {"opcm": OPCM, "safe_share": lambda: SafeShare(0.5, 2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "error"), list(zip(METHODS.values(), (KeyboardInterrupt, MemoryError), strict=True)), ids=METHODS
)
def test_an_interrupt_at_any_line_leaves_the_merge_before_or_after(
    make: Callable[[], MergeMethod], error: type[BaseException]
) -> None:
    base = tower(layers=1)
    undisturbed = ContinualMerger(base, make(), max_response=0.01)
    undisturbed.fold(tuned(base, 1), "one")
    undisturbed.fold(tuned(base, 2), "two")
    after = state_of(undisturbed)
    merger = ContinualMerger(base, make(), max_response=0.01)
    merger.fold(tuned(base, 1), "one")
    before = state_of(merger)
    line, whole = 0, False
    while not whole:
        line += 1
        try:
            with interrupted_at(line, error):
                merger.fold(tuned(base, 2), "two")
            whole = True
        except error:
            pass
        found = state_of(merger)
        assert found == (after if found["tasks"] == ["one", "two"] else before), f"line {line}"
        if found["tasks"] == ["one", "two"] and not whole:  # the last lines: begin again to interrupt the rest
            merger = ContinualMerger(base, make(), max_response=0.01)
            merger.fold(tuned(base, 1), "one")
    assert line > 100
    assert state_of(merger) == after


@dataclass
class Loud(Add):
    """A method of somebody else with a setting that JSON does not have."""

    volume: float = 1.0


@pytest.mark.parametrize("value", [math.inf, math.nan, object()])
def test_a_setting_that_no_file_can_hold_is_refused_before_anything_is_folded(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`volume` of Loud is .* no plain finite value"):
        ContinualMerger(tower(), Loud(volume=value))


def test_a_setting_that_becomes_infinite_later_leaves_no_task() -> None:
    base = tower()
    method = Loud()
    merger = ContinualMerger(base, method)
    merger.fold(tuned(base, 1), "one")
    before = state_of(merger)
    method.volume = math.inf
    with pytest.raises(ValueError, match="JSON"):
        merger.fold(tuned(base, 2), "two")
    assert state_of(merger) == before
