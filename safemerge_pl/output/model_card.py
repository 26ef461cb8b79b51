"""README.md of an output: what was merged from what, how, and how to load it."""

import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from safemerge_pl.checkpoints.open import Checkpoint
from safemerge_pl.folding.fates import in_words
from safemerge_pl.output.card_data import Cards, card_data, find_licences, read_cards
from safemerge_pl.output.files import LEDGER_FILE
from safemerge_pl.output.loaders import Loader
from safemerge_pl.output.state import MergeState
from safemerge_pl.runtime.environment import environment
from safemerge_pl.runtime.names import count_of

__all__ = ["model_card", "shorten_paths"]


def model_card(state: MergeState, base: Checkpoint, dtype: str, notes: Sequence[str], loader: Loader) -> str:
    """The model card, with the front matter that the hub reads.

    Local paths are cut to their last part: the rest means nothing to other readers.

    Args:
        state: what was merged.
        base: the model whose files complete the output.
        dtype: of the stored weights.
        notes: what the output lacks.
        loader: how the output is loaded.
    """
    settings, cards = state.values["method"]["init_args"], read_cards(state, base)
    rows = [
        f"| {r.index} | {_cell(r.task)} | `{_cell(r.source)}` | {r.revision or ''} | `{r.incoming[:16]}` "
        f"| `{r.merged[:16]}` | {r.kept_fraction:.1%} | {r.time or ''} |"
        for r in state.reports
    ]
    lines = [
        "---",
        card_data(state, base, cards, loader).to_yaml(),
        "---",
        "",
        "# Merged model",
        "",
        f"`{base.source}` with {count_of(len(rows), 'fine-tuned model')} merged into it, one after "
        f"another and without data, by safemerge_pl with {state.label}. Weights are stored "
        f"{'in the dtype of the base' if dtype == 'same' else f'as {dtype}'}. {loader.use}",
        "",
        "Float32 masters and the state to continue from lie beside: `ContinualMerger.load(folder, pretrained)`, or "
        f"`safemerge fold --merged folder`. `{LEDGER_FILE}` has one line per fold.",
        "",
        "| # | task | incoming model | revision | SHA-256 of its layers | of the merged layers after it | kept | UTC |",
        "|---:|---|---|---|---|---|---:|---|",
        *rows,
        "",
        f"Merged layers: `{state.values['merged']}`. Pretrained layers: `{state.values['reference']}`.",
        "",
        *_scores(state),
        *_shares(state),
        *_bound(state),
        f"- settings: {', '.join(f'{key}={value}' for key, value in settings.items()) or 'none'}",
        f"- command: `{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`",
        "- " + ", ".join(f"{key} {value}" for key, value in environment().items()),
        *_licences(cards),
        *(f"- note: {note}" for note in notes),
    ]
    known = [base.source, str(base.folder), *(str(place) for r in state.reports for place in (r.source, r.path))]
    return shorten_paths("\n".join(lines) + "\n", known)


def shorten_paths(text: str, known: Iterable[str] = ()) -> str:
    """Cut absolute paths to their last part.

    Args:
        text: with paths in it.
        known: paths that may be in it, and may hold spaces.

    Example:
        >>> shorten_paths("of `/data/my models/vit` and /home/me/x.bin, see https://hub/a/b", ["/data/my models/vit"])
        'of `vit` and x.bin, see https://hub/a/b'
    """
    for path in sorted(filter(os.path.isabs, known), key=len, reverse=True):
        text = text.replace(path, Path(path).name)
    start = r"(?<![\w.:/\\-])(?:~?/|[A-Za-z]:[/\\])"
    return re.sub(start + r"(?:[^\s/\\'\"`,;:()\[\]]+[/\\])+(?=[^\s/\\])", "", text)


def _scores(state: MergeState) -> list[str]:
    """What the merge scores, where it was scored."""
    if not state.scores:
        return []
    rows = [f"| {_cell(name)} | {100 * value:.1f} |" for name, value in state.scores.items()]
    return ["Scored after the last fold, in %:", "", "| set | score |", "|---|---:|", *rows, ""]


def _licences(cards: Cards) -> list[str]:
    """The licences of the models, where they differ."""
    found = find_licences(cards)
    if len(set(found.values())) < 2:
        return []
    return [f"- licences, all of which bind the merge: {', '.join(f'{name} {of}' for name, of in found.items())}"]


def _shares(state: MergeState) -> list[str]:
    """What was taken of each task vector, and what was left out."""
    known = [(report.task, in_words(report.shares)) for report in state.reports if report.shares]
    return [f"- {_cell(task)}: {told}" for task, told in known]


def _bound(state: MergeState) -> list[str]:
    """How much of the accumulated vector is deployed, where it is bounded."""
    bound, last = state.values.get("max_response"), state.reports[-1] if state.reports else None
    max_drift = state.values.get("max_drift")
    if last is None or last.response is None:
        return []
    asked = [] if bound is None else [f"response at most {bound:g}; unscaled it is {last.response:.4g}"]
    if max_drift is not None and last.drift is not None:
        asked.append(f"drift of features of noise at most {max_drift:.2%}; it is {last.drift:.2%}")
    if not asked:
        return []
    return [f"- bound: {', and '.join(asked)}, so {last.scale:.1%} of the accumulated vector is deployed"]


def _cell(text: str) -> str:
    """Text that does not break a table."""
    return " ".join(text.split()).replace("|", "\\|")
