"""Text sets: one prompt per example, scored by what the model writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import Dataset
from torchmetrics.functional.regression import spearman_corrcoef

from safemerge_pl.backbones.base import Backbone
from safemerge_pl.backbones.t5 import T5Backbone
from safemerge_pl.data.labelled import LabelledSet, SetScore

__all__ = ["ExactMatchScore", "SpearmanScore", "TextMetric", "TextSet"]

TextMetric = Literal["exact_match", "spearman"]
TextBatch = tuple[dict[str, Tensor], list[str], Tensor]
"""Tokens by name ``(N, length)``, the N right answers, and the examples' positions in the set ``(N,)``."""


@dataclass(frozen=True)
class TextSet(LabelledSet):
    """Examples with the prompt that asks for their label.

    Attributes:
        prompt: with a column's name in braces where its text stands.
        answers: what the model must write, by label; if empty the label itself with one decimal.
        metric: ``"exact_match"`` counts answers that equal the right one to the letter; ``"spearman"`` correlates the
            ranks of answers and labels.
    """

    prompt: str
    answers: tuple[str, ...] = ()
    metric: TextMetric = "exact_match"

    def prompts(self, indices: Sequence[int]) -> tuple[list[str], list[str]]:
        """Prompts and right answers of some examples.

        Example:
            >>> import datasets
            >>> rows = datasets.Dataset.from_dict({"text": ["so {good}"], "label": [3.25]})
            >>> TextSet("a", rows, "Rate '{text}'.", metric="spearman").prompts([0])
            (["Rate 'so {good}'."], ['3.2'])
        """
        rows = self.rows[list(indices)]
        examples = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        answers = [self.answers[row["label"]] if self.answers else f"{row['label']:.1f}" for row in examples]
        return [self.prompt.format(**row) for row in examples], answers

    def batches(self, backbone: Backbone) -> Dataset[Any]:
        """Batches of :data:`TextBatch`, padded to their longest prompt."""
        return _Prompts(self, _for_text(backbone))

    def score(self, backbone: Backbone) -> SetScore:
        """Exact match or rank correlation."""
        kind = {"exact_match": ExactMatchScore, "spearman": SpearmanScore}[self.metric]
        return kind(self, _for_text(backbone))


class _TextScore(SetScore):
    """What the two scores share: the model's answers as texts.

    Args:
        texts: the set.
        backbone: loaded.
    """

    def __init__(self, texts: TextSet, backbone: T5Backbone) -> None:
        self.name, self.size, self.backbone = texts.name, len(texts), backbone

    def __call__(self, inputs: dict[str, Tensor]) -> list[str]:
        """The answers to the prompts of a batch."""
        try:
            return self.backbone.decode(self.backbone(inputs))
        except FloatingPointError as error:
            raise FloatingPointError(f"set '{self.name}': {error}") from error


class ExactMatchScore(_TextScore):
    """Share of answers that equal the right one to the letter: case and spaces count."""

    def zero(self) -> Tensor:
        """Right answers and examples, ``(2,)``."""
        return torch.zeros(2, dtype=torch.int64)

    def count(self, batch: TextBatch) -> Tensor:
        """See :class:`SetScore`."""
        inputs, answers, _ = batch
        pairs = zip(self(inputs), self.backbone.written(answers), strict=True)
        return torch.tensor([sum(found == wanted for found, wanted in pairs), len(answers)])


class SpearmanScore(_TextScore):
    r"""Spearman's :math:`\rho` of the numbers that the model writes and those it should write, in ``[-1, 1]``.

    An answer that is no finite number counts as 0. Where all answers are equal the correlation is undefined, and the
    score 0: such a model tells nothing apart. Each example has a column of its own in the counts, so the sum over
    processes is exact, whichever of them saw it.
    """

    def zero(self) -> Tensor:
        """Number written, number wanted and how often seen, ``(3, examples)``."""
        return torch.zeros(3, self.size, dtype=torch.float64)

    def count(self, batch: TextBatch) -> Tensor:
        """See :class:`SetScore`."""
        inputs, answers, places = batch
        counts = self.zero()
        counts[0, places.cpu()] = torch.tensor([_number(answer) for answer in self(inputs)], dtype=torch.float64)
        counts[1, places.cpu()] = torch.tensor([_number(answer) for answer in answers], dtype=torch.float64)
        counts[2, places.cpu()] = 1
        return counts

    def value(self, counts: Tensor) -> tuple[float, int]:
        """See :class:`SetScore`."""
        written, wanted, seen = counts[:, counts[2] > 0]
        if len(seen) < 2 or not (written.std() > 0 and wanted.std() > 0):
            return 0.0, len(seen)
        return float(spearman_corrcoef(written, wanted)), len(seen)


class _Prompts(Dataset[Any]):
    """Formats and tokenises a batch when it is asked for."""

    def __init__(self, texts: TextSet, backbone: T5Backbone) -> None:
        self.texts, self._preprocess = texts, backbone.preprocess

    def __len__(self) -> int:
        return len(self.texts)

    def __getitems__(self, indices: list[int]) -> TextBatch:
        prompts, answers = self.texts.prompts(indices)
        return self._preprocess(prompts), answers, torch.tensor(indices)


def _number(answer: str) -> float:
    """A finite number, or 0 for anything else.

    Example:
        >>> [_number(answer) for answer in ("3.8", " 4", "five", "nan", "")]
        [3.8, 4.0, 0.0, 0.0, 0.0]
    """
    try:
        number = float(answer)
    except ValueError:
        return 0.0
    return number if abs(number) < float("inf") else 0.0


def _for_text(backbone: Backbone) -> T5Backbone:
    if not isinstance(backbone, T5Backbone):
        raise MisconfigurationException(f"{type(backbone).__name__} writes no text; score text sets with a T5Backbone.")
    return backbone
