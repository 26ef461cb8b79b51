"""Rows of a table: the scores of one model on every set, and the two rows that every merge is compared with."""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from safemerge_pl.checkpoints.open import Source
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.functional import summarise
from safemerge_pl.scoring.scorer import Scorer
from safemerge_pl.scoring.weights import expert_weights, swapped_weights

__all__ = ["Row", "individual_row", "measure_references", "require_published", "score_row", "sets_to_score"]

Row = dict[str, Any]
"""``ACC``, ``Gen`` and ``H`` where defined, and ``accuracies`` by set; plain values."""


def score_row(scorer: Scorer) -> Row:
    """The weights in place on all tasks and control sets of the data."""
    data = scorer.data
    return _row({name: scorer.score(name) for name in (*data.stream, *data.controls)}, data)


def individual_row(
    scorer: Scorer,
    tower: nn.Module,
    sources: Mapping[str, Source],
    on_expert: Callable[[str, Row], None] = lambda *_: None,
    pretrained: Source | None = None,
) -> Row:
    """Each expert on its own task, and the experts' mean on every control set.

    Args:
        scorer: of the backbone that holds ``tower``.
        tower: gets each expert's weights for a while.
        sources: the expert of each task.
        on_expert: called after each expert with its task and row.
        pretrained: what adapters are put on; the tower itself, if it holds the pretrained weights.
    """
    data = scorer.data
    own: dict[str, float] = {}
    controls: dict[str, list[float]] = {name: [] for name in data.controls}
    for task, source in sources.items():
        with swapped_weights(tower, expert_weights(tower, source, pretrained)):
            scores = {name: scorer.score(name) for name in (task, *data.controls)}
        own[task] = scores[task]
        for name in data.controls:
            controls[name].append(scores[name])
        on_expert(task, {"acc": own[task], **summarise([], [scores[name] for name in data.controls])})
    return _row({**own, **{name: sum(values) / len(values) for name, values in controls.items()}}, data)


def sets_to_score(
    data: StreamDataModule, sources: Collection[str], rows: Collection[str], wanted: Collection[str]
) -> list[str]:
    """The sets that :func:`measure_references` goes through, in its order and as often.

    Args:
        data: with tasks and control sets.
        sources: tasks that have an expert.
        rows: those that are known.
        wanted: those that are wanted.
    """
    missing = set(wanted) - set(rows)
    own = [name for task in sources for name in (task, *data.controls)] if "individual" in missing else []
    return [*data.stream, *data.controls, *own] if "pretrained" in missing else own


def measure_references(
    scorer: Scorer,
    tower: nn.Module,
    sources: Mapping[str, Source],
    rows: dict[str, Row],
    *,
    wanted: Collection[str] = ("pretrained", "individual"),
    pretrained: Mapping[str, Tensor] | None = None,
    within: float | None = None,
    on_row: Callable[[str, Row], None] = lambda *_: None,
) -> None:
    """Measure the two rows that every merge is compared with, as far as they are wanted and not known yet.

    Args:
        scorer: of the backbone that holds ``tower``.
        tower: gets the pretrained weights and each expert's for a while.
        sources: the expert of each task.
        rows: those known so far; each new one is added as soon as it is measured.
        wanted: ``"pretrained"``, the pretrained model on all sets; ``"individual"``, see :func:`individual_row`.
        pretrained: the pretrained weights by the tower's names; left out where the tower holds them.
        within: how far scores may be off the published ones, see :func:`require_published`.
        on_row: called with ``"pretrained"``, ``"expert <task>"`` after each expert, and ``"individual"``, and the row.

    Raises:
        MisconfigurationException: if a score is further off; that of an expert right after it was measured.
    """
    data = scorer.data
    require_published(data, "pretrained", {}, within)  # before anything takes long

    def on_expert(task: str, row: Row) -> None:
        on_row(f"expert {task}", row)
        require_published(data, "individual", {task: row["acc"]}, within)

    if "pretrained" in wanted and "pretrained" not in rows:
        with nullcontext() if pretrained is None else swapped_weights(tower, pretrained):
            rows["pretrained"] = score_row(scorer)
        on_row("pretrained", rows["pretrained"])
        require_published(data, "pretrained", rows["pretrained"]["accuracies"], within)
    if "individual" in wanted and "individual" not in rows:
        rows["individual"] = individual_row(scorer, tower, sources, on_expert, pretrained)
        on_row("individual", rows["individual"])


def require_published(data: StreamDataModule, kind: str, found: Mapping[str, float], within: float | None) -> None:
    """Compare scores with the published ones, a test of model, data and prompts at once.

    Args:
        data: knows the published scores.
        kind: ``"pretrained"`` or ``"individual"``, whose scores they are.
        found: score by set; sets without a published score pass.
        within: how far a score may be off, a share; ``None`` compares nothing.

    Raises:
        MisconfigurationException: with every score that is further off, or if no score is published.
    """
    if within is None:
        return
    published = data.expected.get(kind, {})
    if not published:
        raise MisconfigurationException(
            f"`assert_scores` is set, but {type(data).__name__} knows no published scores as it is set up."
        )
    far = [name for name in found if abs(found[name] - published.get(name, found[name])) > within]
    if far:
        scores = "; ".join(f"{name} {100 * found[name]:.2f}, published {100 * published[name]:.2f}" for name in far)
        raise MisconfigurationException(
            f"the {'experts' if kind == 'individual' else 'pretrained model'} should score within {100 * within:g} "
            f"points of the published numbers, but: {scores}. Model, data or prompts are others; without "
            "`assert_scores` the run goes on."
        )


def _row(accuracies: dict[str, float], data: StreamDataModule) -> Row:
    tasks, controls = [accuracies[name] for name in data.stream], [accuracies[name] for name in data.controls]
    return {**summarise(tasks, controls), "accuracies": accuracies}
