"""What a fold reports of itself."""

import json
from dataclasses import asdict

import pytest
import torch
from tiny import (
    Add,
    folded,
    fresh,
)

from safemerge_pl.merger import ContinualMerger, FoldReport


def test_the_report_of_a_fold_is_worked_out_by_hand() -> None:
    base = {"layers.0.mlp.up_proj.weight": torch.zeros(2, 2), "layers.0.mlp.gate_proj.weight": torch.ones(2, 2)}
    incoming = {"layers.0.mlp.up_proj.weight": torch.tensor([[3.0, 0.0], [0.0, 4.0]])} | {
        "layers.0.mlp.gate_proj.weight": torch.ones(2, 2)
    }
    merger = ContinualMerger(base, Add(scaling=0.5))
    report = merger.fold(incoming, "mnist")
    assert (report.task, report.index, report.kept_fraction, report.losses, report.notes) == ("mnist", 1, 1.0, (), ())
    up, gate = report.layers
    assert (up.layer, up.task_norm, up.update_norm, up.kept_fraction, up.loss_first, up.loss_last) == (
        "model.0.up",
        5.0,
        2.5,
        1.0,
        None,
        None,
    )
    assert (gate.layer, gate.task_norm, gate.update_norm) == ("model.0.gate", 0.0, 0.0)
    assert report.merged == merger.fingerprint()
    assert report.seconds > 0
    assert merger.fold(incoming, "again").index == 2


def test_a_report_survives_strict_json() -> None:
    """Plain values and no NaN."""
    report = folded(1, 2).reports[1]
    assert FoldReport.from_dict(json.loads(json.dumps(asdict(report), allow_nan=False))) == report
    assert len(report.losses) == 4
    assert [row.layer for row in report.layers] == [layer.name for layer in fresh().layers]
    assert 0 < report.kept_fraction < 1


@pytest.mark.parametrize(
    ("name", "value"), [("path", 0), ("revision", ["a"]), ("response", "much"), ("drift", [0.1]), ("scale", None)]
)
def test_a_later_entry_of_another_kind_is_refused(name: str, value: object) -> None:
    """Entries that earlier versions did not write may be missing, but not be anything."""
    values = json.loads(json.dumps(asdict(folded(1).reports[0])))
    assert FoldReport.from_dict({key: known for key, known in values.items() if key != name}).task == "task1"
    with pytest.raises(ValueError, match=f"`{name}` is"):
        FoldReport.from_dict({**values, name: value})


def test_losses_are_summed_over_the_layers() -> None:
    report = folded(1, 2).reports[1]
    assert report.losses[0] == pytest.approx(sum(row.loss_first or 0 for row in report.layers))
    assert report.losses[-1] == pytest.approx(sum(row.loss_last or 0 for row in report.layers))
