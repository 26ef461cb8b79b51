"""Options for merging inside a training loop."""

import json
from typing import Any

import pytest
from loops import TASKS

from safemerge_pl.callbacks import SAFEMergeCallback


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs_per_task": 0}, "`epochs_per_task` must be at least 1, got 0"),
        ({"epochs_per_task": 2, "boundary": "fit"}, "either `epochs_per_task` or `boundary`"),
        ({"tasks": TASKS}, "`tasks` is about merging in a training loop, which needs either"),
        ({"epochs_per_task": 2, "experts": {"a": "x"}}, "give `experts` .* or `epochs_per_task`.*not both"),
        ({"epochs_per_task": 2, "tasks": ["a", "A"]}, "distinct names, got A, a"),
        ({"boundary": "fit", "metric": "val_acc"}, "`metric` never sees the merged weights; use `score`"),
        ({"epochs_per_task": 2, "metric": "x", "score": dict}, "`metric` or `score`, not both"),
        ({"epochs_per_task": 2, "controls": ["x"]}, "`controls` needs `metric` or `score`"),
        ({"epochs_per_task": 2, "rest": "kept"}, "`rest` must be 'pretrained' or 'keep', got 'kept'"),
        ({"epochs_per_task": 2, "restart_from": "zero"}, "`restart_from` must be 'pretrained' or 'merged', got 'zero'"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SAFEMergeCallback(**options)


def test_options_can_stand_in_a_configuration() -> None:
    """Names, types and help of the live options reach the command line."""
    import jsonargparse

    from safemerge_pl.callbacks import MergeCallback, SAFEMergeCallback

    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--merge", type=MergeCallback)
    options = ["--merge.epochs_per_task=3", "--merge.rest=keep", "--merge.tasks=[a, b]", "--merge.keep_ratio=0.25"]
    config = parser.parse_args([f"--merge={SAFEMergeCallback.__module__}.SAFEMergeCallback", *options])
    build = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before 4.50
    merge = build(config).merge
    assert merge.live.epochs_per_task == 3
    assert merge.live.planned == ["a", "b"]
    again = parser.parse_object(json.loads(parser.dump(config, format="json")))
    assert build(again).merge.live.options["rest"] == "keep"
