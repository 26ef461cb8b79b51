"""What one fold did, layer by layer."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from safemerge_pl.methods.base import Stack, StackResult
from safemerge_pl.runtime.cores import distances

__all__ = ["FoldReport", "LayerReport", "layer_rows", "whole_row"]


@dataclass(frozen=True)
class LayerReport:
    """What one fold did to one layer.

    Attributes:
        layer: canonical name.
        kept_fraction: share of the task vector's entries that were merged.
        loss_first: loss before the inner optimisation, ``None`` where there is none.
        loss_last: loss after it.
        task_norm: Frobenius norm of the task vector.
        update_norm: Frobenius norm of what was added to the merged weights.
    """

    layer: str
    kept_fraction: float
    loss_first: float | None
    loss_last: float | None
    task_norm: float
    update_norm: float

    @property
    def sound(self) -> bool:
        """Whether all numbers are finite; an overflow shows here."""
        numbers = (self.loss_first or 0.0, self.loss_last or 0.0, self.task_norm, self.update_norm)
        return all(map(math.isfinite, numbers))


@dataclass(frozen=True)
class FoldReport:
    """What one fold did.

    Attributes:
        task: name of the task.
        index: its position in the stream, from 1.
        source: where the incoming model came from.
        incoming: SHA-256 of the incoming tensors that were merged.
        merged: SHA-256 of the merged weights afterwards.
        seconds: wall time, checks included.
        solve_seconds: wall time of the inner optimisation alone.
        kept_fraction: share of all entries that were merged.
        losses: loss before every step of the inner optimisation and after the last, summed over layers.
        layers: one report per layer.
        notes: what the user should know (an unchanged task, a checkpoint folded before).
        path: where the incoming model lay, resolved; ``None`` for one in memory.
        revision: its commit, if it came from the hub.
        time: when, UTC.
        version: of this package.
        response: of the accumulated vector, before it was scaled; ``None`` where nothing bounds it.
        scale: share of the accumulated vector that is deployed.
    """

    task: str
    index: int
    source: str
    incoming: str
    merged: str
    seconds: float
    solve_seconds: float
    kept_fraction: float
    losses: tuple[float, ...]
    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...]
    path: str | None = field(default=None, compare=False)
    revision: str | None = field(default=None, compare=False)
    time: str | None = field(default=None, compare=False)
    version: str | None = field(default=None, compare=False)
    response: float | None = None
    scale: float = 1.0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "FoldReport":
        """Undo ``dataclasses.asdict``; entries that a newer version added are passed over.

        Raises:
            ValueError: if an entry is of another kind than it was; others for entries that are missing.
        """
        _require_kinds(values, _KINDS)
        for layer in values["layers"]:
            _require_kinds(layer, _LAYER_KINDS)
        _require_kinds(dict(enumerate(values["losses"])), dict.fromkeys(range(len(values["losses"])), _NUMBER))
        known = {entry.name for entry in fields(cls)}
        layers = tuple(LayerReport(**layer) for layer in values["layers"])
        found = {**values, "layers": layers, "losses": tuple(values["losses"]), "notes": tuple(values["notes"])}
        return cls(**{name: value for name, value in found.items() if name in known})


_NUMBER: tuple[type, ...] = (int, float)
_KINDS: dict[Any, tuple[type, ...]] = {
    **dict.fromkeys(("task", "source", "incoming", "merged"), (str,)),
    "index": (int,),
    **dict.fromkeys(("seconds", "solve_seconds", "kept_fraction"), _NUMBER),
}
_LAYER_KINDS: dict[Any, tuple[type, ...]] = {
    "layer": (str,),
    **dict.fromkeys(("kept_fraction", "task_norm", "update_norm"), _NUMBER),
    **dict.fromkeys(("loss_first", "loss_last"), (*_NUMBER, type(None))),
}
"""What stands in a report that is read from a file."""


def _require_kinds(values: dict[Any, Any], kinds: dict[Any, tuple[type, ...]]) -> None:
    odd = [name for name, kind in kinds.items() if type(values[name]) not in kind]
    if odd:
        raise ValueError(f"`{odd[0]}` is {str(values[odd[0]])[:100]!r}")


def layer_rows(stack: Stack, result: StackResult) -> list[LayerReport]:
    """One report per layer of a stack; synchronises the device a few times, after the stack's work is queued."""
    count = len(stack.layers)
    kept = torch.ones(count) if result.kept_fraction is None else result.kept_fraction
    first, last = (None, None) if result.losses is None else (result.losses[0].tolist(), result.losses[-1].tolist())
    task_norms, update_norms = distances(stack.incoming, stack.pretrained), distances(result.merged, stack.merged)
    return [
        LayerReport(
            layer=stack.layers[row],
            kept_fraction=kept[row].item(),
            loss_first=None if first is None else first[row],
            loss_last=None if last is None else last[row],
            task_norm=task_norms[row],
            update_norm=update_norms[row],
        )
        for row in range(count)
    ]


def whole_row(parts: list[tuple[float, LayerReport]]) -> LayerReport:
    """The report of a layer that was folded in parts, each with its share of the entries.

    Example:
        >>> half = LayerReport("x", 0.5, None, None, task_norm=3.0, update_norm=0.0)
        >>> whole_row([(0.5, half), (0.5, LayerReport("x", 1.0, None, None, task_norm=4.0, update_norm=2.0))])
        LayerReport(layer='x', kept_fraction=0.75, loss_first=None, loss_last=None, task_norm=5.0, update_norm=2.0)
    """
    rows = [row for _, row in parts]
    return LayerReport(
        layer=rows[0].layer,
        kept_fraction=sum(share * row.kept_fraction for share, row in parts),
        loss_first=None,
        loss_last=None,
        task_norm=math.hypot(*(row.task_norm for row in rows)),
        update_norm=math.hypot(*(row.update_norm for row in rows)),
    )
