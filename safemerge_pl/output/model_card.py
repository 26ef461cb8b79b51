"""README.md of an output: what was merged from what, how, and how to load it."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from safemerge_pl.checkpoints.open import Checkpoint
from safemerge_pl.output.files import LEDGER_FILE
from safemerge_pl.output.loaders import Loader
from safemerge_pl.output.state import MergeState
from safemerge_pl.runtime.environment import environment
from safemerge_pl.runtime.files import local_path

__all__ = ["model_card"]


def model_card(state: MergeState, base: Checkpoint, dtype: str, notes: Sequence[str], loader: Loader) -> str:
    """The model card, with the front matter that the hub reads.

    ``base_model`` is given where the base came from the hub; a local path means nothing to other readers.

    Args:
        state: what was merged.
        base: the model whose files complete the output.
        dtype: of the stored weights.
        notes: what the output lacks.
        loader: how the output is loaded.
    """
    from huggingface_hub import ModelCardData

    front = ModelCardData(
        base_model=_hub_id(base.source),
        library_name=loader.library,
        tags=["merge", "continual-learning", "safemerge_pl"],
    )
    settings = state.values["method"]["init_args"]
    rows = [
        f"| {r.index} | {_cell(r.task)} | `{_cell(r.source)}` | {r.revision or ''} | `{r.incoming[:16]}` "
        f"| `{r.merged[:16]}` | {r.kept_fraction:.1%} | {r.time or ''} |"
        for r in state.reports
    ]
    lines = [
        "---",
        front.to_yaml(),
        "---",
        "",
        "# Merged model",
        "",
        f"`{base.source}` with {len(rows)} fine-tuned model{'' if len(rows) == 1 else 's'} merged into it, one after "
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
        *_bound(state),
        f"- settings: {', '.join(f'{key}={value}' for key, value in settings.items()) or 'none'}",
        f"- command: `{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`",
        "- " + ", ".join(f"{key} {value}" for key, value in environment().items()),
        *(f"- note: {note}" for note in notes),
    ]
    return "\n".join(lines) + "\n"


def _bound(state: MergeState) -> list[str]:
    """How much of the accumulated vector is deployed, where it is bounded."""
    bound, last = state.values.get("max_response"), state.reports[-1] if state.reports else None
    if bound is None or last is None or last.response is None:
        return []
    return [
        f"- bound: response at most {bound:g}; unscaled it is {last.response:.4g}, so {last.scale:.1%} of the "
        "accumulated vector is deployed"
    ]


def _hub_id(source: str) -> str | None:
    """The base's name on the hub, without its revision."""
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)(@[\w./-]+)?", source)
    return found[1] if found and not local_path(source).exists() else None


def _cell(text: str) -> str:
    """Text that does not break a table."""
    return " ".join(text.split()).replace("|", "\\|")
