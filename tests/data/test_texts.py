"""Text sets: prompts, right answers, and the two scores of what a model writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small import SmallZoo
from tiny_text import glue, save_t5, t5, write_glue
from torch import nn

from safemerge_pl.backbones.t5 import T5Backbone
from safemerge_pl.data.texts import SpearmanScore, TextSet
from safemerge_pl.module import ContinualMergeModule


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random T5 with its own head, as a folder."""
    return save_t5(t5(), tmp_path_factory.mktemp("t5") / "base")


@pytest.fixture(scope="module")
def backbone(base: Path) -> T5Backbone:
    found = T5Backbone(str(base))
    found.load()
    return found


class Says(T5Backbone):
    """Answers from a list, in order."""

    def __init__(self, answers: list[str]) -> None:
        super().__init__("nowhere")
        self.answers = answers
        self.weight = nn.Parameter(torch.zeros(1))

    def preprocess(self, examples: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(len(examples))}

    def forward(self, inputs: Any) -> torch.Tensor:
        return inputs["input_ids"]  # type: ignore[no-any-return]

    def decode(self, tokens: Any) -> list[str]:
        taken, self.answers = self.answers[: len(tokens)], self.answers[len(tokens) :]
        return taken

    def written(self, answers: Any) -> list[str]:
        return list(answers)


def rows_of(labels: list[float]) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"text": ["x"] * len(labels), "label": labels})


def scored(said: list[str], labels: list[Any], **settings: Any) -> tuple[float, int]:
    texts = TextSet("a", rows_of(labels), "{text}", **settings)
    backbone = Says(said)
    score, batches = texts.score(backbone), texts.batches(backbone)
    counts = score.zero()
    for start in range(0, len(labels), 2):
        counts = counts + score.count(batches.__getitems__(list(range(start, min(start + 2, len(labels))))))
    return score.value(counts)


def test_exact_match_is_to_the_letter() -> None:
    """Case counts, spaces count, nothing is trimmed."""
    answers = ["yes", "Yes", "yes ", "no", "", "yes"]
    assert scored(answers, [1, 1, 1, 1, 1, 0], answers=("no", "yes")) == (1 / 6, 6)


def plain_spearman(left: list[float], right: list[float]) -> float:
    """Pearson's correlation of the mean ranks, worked out in plain Python."""

    def ranks(values: list[float]) -> list[float]:
        return [(sum(w < v for w in values) + sum(w <= v for w in values) + 1) / 2 for v in values]

    a, b = ranks(left), ranks(right)
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    top = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return float(top / (sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)) ** 0.5)


@pytest.mark.parametrize(
    ("answers", "read"),
    [
        (["1.0", "2.0", "3.5", "3.5", "5.0"], [1, 2, 3.5, 3.5, 5]),
        (["5.0", "4", " 3.0", "1e0", "0.2"], [5, 4, 3, 1, 0.2]),
        (["4.0", "what", "2.0", "", "nan"], [4, 0, 2, 0, 0]),
        (["inf", "1.0", "2.0", "-inf", "3.0"], [0, 1, 2, 0, 3]),
    ],
)
def test_spearman_of_what_is_written(answers: list[str], read: list[float]) -> None:
    """Ties share their mean rank; what is no finite number counts as 0."""
    labels = [0.0, 1.04, 2.6, 2.62, 4.4]  # to one decimal: 2.6 twice
    expected = plain_spearman(read, [0.0, 1.0, 2.6, 2.6, 4.4])
    value, counted = scored(answers, labels, metric="spearman")
    assert (round(value, 5), counted) == (round(expected, 5), 5)


@pytest.mark.parametrize(
    ("answers", "labels"),
    [
        (["3.0"] * 4, [1.0, 2.0, 3.0, 4.0]),
        (["no"] * 4, [1.0, 2.0, 3.0, 4.0]),
        (["1.0", "2.0"], [3.0, 3.0]),
        (["1"], [1.0]),
    ],
)
def test_an_undefined_correlation_is_zero(answers: list[str], labels: list[float]) -> None:
    """Constant answers, constant labels, one example: 0, never NaN."""
    assert scored(answers, labels, metric="spearman") == (0.0, len(labels))


def test_counts_of_two_processes_add_up_to_those_of_one() -> None:
    """Each example in a place of its own; a process without any adds zeros."""
    labels, answers = [0.0, 1.0, 2.0, 3.0, 4.0], ["0.5", "0.1", "3.0", "2.0", "5.0"]
    texts = TextSet("a", rows_of(labels), "{text}", metric="spearman")
    total = SpearmanScore(texts, Says([])).zero()
    for shard in ([0, 2, 4], [1, 3], []):
        backbone = Says([answers[index] for index in shard])
        if shard:
            total = total + texts.score(backbone).count(texts.batches(backbone).__getitems__(shard))
    whole = scored(answers, labels, metric="spearman")
    assert texts.score(Says([])).value(total) == whole
    assert whole[0] == pytest.approx(plain_spearman([float(a) for a in answers], labels), abs=1e-5)


def test_kinds_that_do_not_fit_are_told_apart(tmp_path: Path, backbone: T5Backbone, make_trainer: Any) -> None:
    data = glue(write_glue(tmp_path, 2, ["cola"]), ["cola"])
    with pytest.raises(
        MisconfigurationException, match="CLIPBackbone writes no text; score text sets with a T5Backbone"
    ):
        make_trainer().validate(ContinualMergeModule(), data, verbose=False)
    with pytest.raises(MisconfigurationException, match="T5Backbone has no zero-shot heads"):
        make_trainer().validate(ContinualMergeModule(backbone), SmallZoo(["mnist"], []), verbose=False)
