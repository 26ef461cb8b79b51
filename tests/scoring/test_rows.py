"""Rows of a table: references measured once, compared with what is published as soon as they are known."""

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small import SmallZoo
from torch import nn

from safemerge_pl.data.glue import GLUEData
from safemerge_pl.scoring.rows import individual_row, measure_references, require_published, score_row, sets_to_score

SETS = {"mnist": 0.5, "flags": 0.25, "probe1_seen_styles": 1.0}
SOURCES = {"mnist": {"weight": torch.tensor([[0.75]])}, "flags": {"weight": torch.tensor([[1.0]])}}
PRETRAINED = {
    "ACC": 0.1875,
    "Gen": 0.5,
    "H": 2 * 0.1875 * 0.5 / 0.6875,
    "accuracies": {"mnist": 0.25, "flags": 0.125, "probe1_seen_styles": 0.5},
}
INDIVIDUAL = {
    "ACC": (0.375 + 0.25) / 2,
    "Gen": 0.875,
    "H": 2 * 0.3125 * 0.875 / 1.1875,
    "accuracies": {"mnist": 0.375, "flags": 0.25, "probe1_seen_styles": 0.875},
}


class Published(SmallZoo):
    """Two tasks and a probe with published scores."""

    known: dict[str, dict[str, float]] = {}  # noqa: RUF012  # set by a test on the object

    @property
    def expected(self) -> dict[str, dict[str, float]]:
        return self.known


class Product:
    """Scores a set by the one weight of a tower times the set's factor."""

    def __init__(self, weight: float = 0.5) -> None:
        self.data = Published(["mnist", "flags"], ["probe1_seen_styles"])
        self.tower = nn.Linear(1, 1, bias=False)
        self.tower.weight.data.fill_(weight)
        self.asked: list[str] = []

    def score(self, name: str) -> float:
        self.asked.append(name)
        return self.tower.weight.item() * SETS[name]


def references(scorer: Product, rows: dict[str, Any], **settings: Any) -> list[str]:
    """Measure, and give the names of the rows in the order in which they came."""
    seen: list[str] = []
    measure_references(
        scorer,  # type: ignore[arg-type]
        scorer.tower,
        SOURCES,
        rows,
        on_row=lambda what, row: seen.append(what),
        **settings,
    )
    return seen


def test_a_row_has_every_set_and_what_they_add_up_to() -> None:
    assert score_row(Product()) == PRETRAINED  # type: ignore[arg-type]


def test_experts_are_scored_on_their_own_task_and_averaged_on_control_sets() -> None:
    scorer, seen = Product(), {}
    row = individual_row(scorer, scorer.tower, SOURCES, seen.__setitem__)  # type: ignore[arg-type]
    assert row == INDIVIDUAL
    assert seen == {"mnist": {"acc": 0.375, "Gen": 0.75}, "flags": {"acc": 0.25, "Gen": 1.0}}
    assert scorer.tower.weight.item() == 0.5


def test_both_references_are_measured_in_turn() -> None:
    scorer, rows = Product(), dict[str, Any]()
    assert references(scorer, rows) == ["pretrained", "expert mnist", "expert flags", "individual"]
    assert rows == {"pretrained": PRETRAINED, "individual": INDIVIDUAL}


def test_the_pretrained_weights_are_put_in_where_the_tower_holds_others() -> None:
    scorer, rows = Product(weight=0.9), dict[str, Any]()
    references(scorer, rows, pretrained={"weight": torch.tensor([[0.5]])})
    assert rows == {"pretrained": PRETRAINED, "individual": INDIVIDUAL}
    assert scorer.tower.weight.item() == torch.tensor(0.9).item()


def test_what_is_known_or_not_wanted_is_not_measured() -> None:
    scorer, rows = Product(), {"pretrained": PRETRAINED}
    assert references(scorer, rows, wanted=["pretrained"]) == []
    assert scorer.asked == []
    assert references(scorer, rows) == ["expert mnist", "expert flags", "individual"]


@pytest.mark.parametrize("known", [[], ["pretrained"], ["individual"], ["pretrained", "individual"]])
@pytest.mark.parametrize("wanted", [["pretrained"], ["pretrained", "individual"]])
def test_the_sets_to_score_are_known_before(known: list[str], wanted: list[str]) -> None:
    scorer, rows = Product(), {"pretrained": PRETRAINED, "individual": INDIVIDUAL}
    rows = {name: rows[name] for name in known}
    told = sets_to_score(scorer.data, SOURCES, rows, wanted)
    references(scorer, rows, wanted=wanted)
    assert scorer.asked == told


def test_scores_that_are_off_stop_at_once_and_keep_what_was_measured() -> None:
    scorer, rows = Product(), dict[str, Any]()
    scorer.data.known = {"pretrained": PRETRAINED["accuracies"], "individual": {"mnist": 0.375, "flags": 0.5}}
    with pytest.raises(MisconfigurationException, match=r"experts should score within 1 points .*flags 25.00"):
        references(scorer, rows, within=0.01)
    assert list(rows) == ["pretrained"]
    scorer.data.known = {"pretrained": {"mnist": 0.5}}
    with pytest.raises(MisconfigurationException, match=r"pretrained model should score .*mnist 25.00, published 50"):
        references(scorer, {}, within=0.01)


def test_published_scores_that_nobody_knows_stop_before_anything_is_measured() -> None:
    scorer = Product()
    with pytest.raises(MisconfigurationException, match="Published knows no published scores"):
        references(scorer, {}, within=0.01)
    assert scorer.asked == []


def test_scores_off_the_published_ones_stop_the_run() -> None:
    data = GLUEData()
    close = {name: score + 0.004 for name, score in data.expected["pretrained"].items()}
    require_published(data, "pretrained", close, 0.005)
    require_published(data, "pretrained", {"rte": 0.0}, None)
    with pytest.raises(
        MisconfigurationException, match=r"within 0.5 points .*: stsb 62.79, .*; rte 50.00, published 80.14"
    ):
        require_published(data, "pretrained", close | {"rte": 0.5, "stsb": 0.6279}, 0.005)
    with pytest.raises(MisconfigurationException, match="the experts should score within 1 points"):
        require_published(data, "individual", {"cola": 0.5}, 0.01)
    with pytest.raises(MisconfigurationException, match="GLUEData knows no published scores"):
        require_published(GLUEData(max_rows=5), "pretrained", close, 0.01)
