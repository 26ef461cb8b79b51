"""What of a merge goes into an output, and what is found in an earlier one."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from safemerge_pl.checkpoints.open import Checkpoint, CheckpointError, open_checkpoint
from safemerge_pl.folding.bound import MaxResponse, require_drift_bound, require_response_bound
from safemerge_pl.folding.processes import Processes
from safemerge_pl.folding.report import FoldReport
from safemerge_pl.folding.selection import MergePlan
from safemerge_pl.output.files import MASTER_FILE, STATE_FILE
from safemerge_pl.output.ledger import read_ledger

__all__ = ["STATE_FORMAT", "MergeState", "SavedMerge", "explain_reference", "read_state", "require_format"]

STATE_FORMAT = 2
"""Of the state file; format 1 had hashes that were taken in another way."""


@dataclass(frozen=True)
class MergeState:
    """A merge as it stands between two folds: all that an output is made of.

    Attributes:
        plan: the pretrained model, and what is merged of it.
        merged: the merged parameters as deployed, in float32, by the pretrained model's names.
        masters: the same with the whole accumulated vector, which the next fold adds to.
        values: tasks, method, hashes and reports as plain values.
        reports: one per fold.
        ledger: one line of JSON per fold.
        label: name of the method.
        saved: the output that the merge was read from or written to last.
        processes: that write it together, each the tensors that it has.
        owners: rank of the process that has each parameter.
        scores: of the merge as it is, by set and by the names of the scores of a stream, for the card.
    """

    plan: MergePlan
    merged: Mapping[str, Tensor]
    masters: Mapping[str, Tensor]
    values: Mapping[str, Any]
    reports: Sequence[FoldReport]
    ledger: Sequence[str]
    label: str
    saved: Path | None
    processes: Processes
    owners: Mapping[str, int]
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedMerge:
    """An earlier output; weights and ledger are read when they are asked for.

    Attributes:
        folder: where it is.
        values: tasks, method, hashes and reports as plain values.
    """

    folder: Path
    values: dict[str, Any]

    def masters(self) -> Checkpoint:
        """The merged parameters in float32.

        Raises:
            CheckpointError: if they are missing or damaged.
        """
        index = self.folder / f"{MASTER_FILE}.index.json"
        return open_checkpoint(index if index.exists() else self.folder / MASTER_FILE)

    def bounds(self, asked: MaxResponse = "auto") -> tuple[MaxResponse, float | None]:
        """The bounds to go on with, on the response and on the drift: those of then.

        Args:
            asked: another bound on the response than ``"auto"`` is returned as it is.

        Raises:
            CheckpointError: if what stands there is no bound.
        """
        response, drift = self.values.get("max_response"), self.values.get("max_drift")
        try:
            require_response_bound(response)
            require_drift_bound(drift)
        except ValueError as error:
            raise CheckpointError(f"{self.folder / STATE_FILE} is damaged: {error}") from error
        return response if asked == "auto" else asked, drift

    def ledger(self) -> list[str]:
        """One line of JSON per fold, as they stand there."""
        return read_ledger(self.folder)


def read_state(folder: Path) -> dict[str, Any]:
    """The plain values of an earlier output.

    Raises:
        CheckpointError: if the folder holds none.
    """
    path = folder / STATE_FILE
    if not path.exists():
        raise CheckpointError(f"{folder} holds no {STATE_FILE}: it is not the output of a merge.")
    try:
        values = json.loads(path.read_text())
        version = values["format"]
        whole = version != STATE_FORMAT or {"reference", "merged", "method", "reports"} <= values.keys()
        whole &= all(type(name) is str for name in values.get("files", ()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fold again from the last whole output.") from error
    require_format(version, str(path))
    if not whole:
        raise CheckpointError(f"{path} is incomplete; fold again from the last whole output.")
    complete: dict[str, Any] = values
    return complete


def require_format(version: object, source: str) -> None:
    """Refuse the state of an earlier or a later version.

    Raises:
        CheckpointError: with what to do about it.
    """
    if version != STATE_FORMAT:
        remedy = "fold again from the pretrained model" if version == 1 else "use a newer safemerge_pl"
        raise CheckpointError(f"{source} has format {version}, this version reads format {STATE_FORMAT}; {remedy}.")


def explain_reference(state: Mapping[str, Any], units: Iterable[str], source: str, reference: str) -> str:
    """Say why a saved merge has other pretrained layers: others were chosen, or the model is another one.

    Args:
        state: the plain values of the saved merge.
        units: names of the layers that are chosen now.
        source: the pretrained model that is given now.
        reference: fingerprint of its layers.
    """
    reports = state.get("reports") or [{}]
    rows = reports[0].get("layers") if isinstance(reports, list) and isinstance(reports[0], dict) else None
    then = {row.get("layer") for row in rows if isinstance(row, dict)} if isinstance(rows, (list, tuple)) else set()
    odd = sorted(str(name) for name in then ^ set(units))
    if then and odd:
        return (
            f"the merge was made of other layers than are chosen now ({len(odd)} differ, first `{odd[0]}`); give "
            "the same `layers` and pretrained model."
        )
    return (
        "the merge was started from another pretrained model (its layers hash to "
        f"{str(state.get('reference'))[:12]}, those of {source} to {reference[:12]}); give the same one."
    )
