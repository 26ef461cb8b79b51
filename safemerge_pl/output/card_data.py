"""The front matter of a model card: what the hub reads of an output."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safemerge_pl.checkpoints.open import Checkpoint
from safemerge_pl.functional import SCORES
from safemerge_pl.output.files import CARD_FILE
from safemerge_pl.output.loaders import Loader
from safemerge_pl.output.state import MergeState
from safemerge_pl.runtime.files import local_path

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

__all__ = ["Cards", "card_data", "find_licences", "read_cards"]

Cards = Sequence[tuple[str, dict[str, Any]]]
"""Name of a model, and the front matter of its own card; that of the base comes first."""

_LONGEST = 10**6
"""Bytes of a model card that is read."""


def card_data(state: MergeState, base: Checkpoint, cards: Cards, loader: Loader) -> "ModelCardData":
    """Collect what the hub reads: the models that were merged, their data sets and licence, and the scores.

    Models are named where they came from the hub; a local path means nothing to other readers. Licence and data sets
    are those that the cards of the models name; there is no licence where they name different ones.

    Args:
        state: what was merged.
        base: the model whose files complete the output.
        cards: of the models, from :func:`read_cards`.
        loader: how the output is loaded.
    """
    from huggingface_hub import EvalResult, ModelCardData

    licences = set(find_licences(cards).values())
    found: dict[str, Any] = {"license": licences.pop()} if len(licences) == 1 else {}
    models = [name for name in map(_hub_id, [base.source, *(report.source for report in state.reports)]) if name]
    if models:
        found |= {"base_model": models[0] if len(models) == 1 else list(dict.fromkeys(models))}
        found |= {"base_model_relation": "merge"}
    sets = [name for _, card in cards for name in _texts(card.get("datasets"))]
    if sets:
        found["datasets"] = list(dict.fromkeys(sets))
    kind = next((card["pipeline_tag"] for _, card in cards[:1] if isinstance(card.get("pipeline_tag"), str)), "other")
    if state.scores:
        found["model_name"] = "merged"
        found["eval_results"] = [
            EvalResult(task_type=kind, dataset_type=name, dataset_name=name, metric_type="accuracy", metric_value=value)
            for name, value in state.scores.items()
            if name not in SCORES
        ]
    return ModelCardData(library_name=loader.library, tags=["merge", "continual-learning", "safemerge_pl"], **found)


def find_licences(cards: Cards) -> dict[str, str]:
    """Find the licence of each model whose own card names one, by the name of the model.

    Args:
        cards: of the models, from :func:`read_cards`.

    Example:
        >>> find_licences([("the base", {"license": "mit"}), ("digits", {})])
        {'the base': 'mit'}
    """
    return {name: card["license"] for name, card in cards if isinstance(card.get("license"), str)}


def read_cards(state: MergeState, base: Checkpoint) -> Cards:
    """Read the front matter of the cards beside the base and the incoming models.

    Args:
        state: what was merged.
        base: the model whose files complete the output.

    Returns:
        The base first, then one per fold; empty for a model without a card, or with one that cannot be read.
    """
    incoming = ((report.task, None if report.path is None else Path(report.path)) for report in state.reports)
    return [(name, _front_matter(place)) for name, place in (("the base", base.folder), *incoming)]


def _front_matter(place: Path | None) -> dict[str, Any]:
    """Front matter of the card of a model; empty without one, or if it cannot be read."""
    from huggingface_hub.repocard import metadata_load

    if place is None:
        return {}
    file = (place if place.is_dir() else place.parent) / CARD_FILE
    try:
        found = metadata_load(file) if file.is_file() and file.stat().st_size <= _LONGEST else None
    except Exception:  # somebody else's file, whatever is in it, must not stop the merge
        return {}
    return found if isinstance(found, dict) else {}


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def _hub_id(source: str) -> str | None:
    """A model's name on the hub, without its revision."""
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)(@[\w./-]+)?", source)
    return found[1] if found and not local_path(source).exists() else None
