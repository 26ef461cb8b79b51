"""What one fold did, layer by layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from safemerge_pl.architectures.groups import FATES
from safemerge_pl.folding.fates import GroupShares, in_words, total
from safemerge_pl.folding.leading import share_inside
from safemerge_pl.methods.base import Stack, StackResult
from safemerge_pl.runtime.cores import distances

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FoldReport", "LayerReport", "layer_rows", "leading_of", "whole_row"]


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
        taken: share of the squared task vector that the method took; ``None`` in a report of an earlier version.
        recovered: share of it that the method did not take and made up for; likewise.
        leading: share of it that lies in the pretrained matrix's leading directions; ``None`` where nobody looked.
    """

    layer: str
    kept_fraction: float
    loss_first: float | None
    loss_last: float | None
    task_norm: float
    update_norm: float
    taken: float | None = None
    recovered: float | None = None
    leading: float | None = None

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
        drift: of the merge as deployed, where a bound on it holds.
        shares: what became of the squared task vector, by group of tensors; empty in a report of an earlier version,
            and where nothing was changed.
        leading: share of the change that lies in the pretrained model's leading directions, see
            :class:`~safemerge_pl.folding.leading.LeadingDirections`; ``None`` for an adapter, whose directions are
            those it began with, and where there is none.
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
    drift: float | None = None
    shares: tuple[GroupShares, ...] = ()
    leading: float | None = None

    def __str__(self) -> str:
        """What was done, in a few sentences."""
        told = in_words(self.shares)
        lines = [
            f"'{self.task}' folded as task {self.index} from {self.source} in {self.seconds:.1f} s: "
            f"{self.kept_fraction:.0%} of the entries in {len(self.layers)} layers.",
            *([f"{told}."] if told else []),
        ]
        if self.leading is not None:
            lines.append(f"{self.leading:.0%} of its change lies in the pretrained model's leading directions.")
        if self.response is not None:
            moved = f"response {self.response:.4f}" + ("" if self.drift is None else f", drift {self.drift:.2%}")
            lines.append(f"{self.scale:.1%} of the accumulated vector is deployed ({moved}).")
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def table(self) -> "Table":
        """What became of the task vector, by group of tensors; print it with ``rich.print``."""
        from rich.table import Table

        table = Table(title=f"{self.task}: the squared task vector (%)")
        table.add_column("", no_wrap=True)
        for head in (*FATES.values(), "all"):
            table.add_column(head, justify="right")
        for group in self.shares:
            table.add_row(group.group, *map(_percent, _parts(group)))
        if self.shares:
            table.add_section()
            table.add_row("all", *map(_percent, _parts(total(self.shares))), style="bold")
        return table

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "FoldReport":
        """Undo ``dataclasses.asdict``; entries that a newer version added are passed over.

        Raises:
            ValueError: if an entry is of another kind than it was; others for entries that are missing.
        """
        _require_kinds(values, _KINDS)
        _require_kinds(values, {name: kind for name, kind in _LATER_KINDS.items() if name in values})
        for layer in values["layers"]:
            _require_kinds(layer, _LAYER_KINDS)
        _require_kinds(dict(enumerate(values["losses"])), dict.fromkeys(range(len(values["losses"])), _NUMBER))
        for group in values.get("shares", ()):
            _require_kinds(group, _SHARE_KINDS)
        found = {**values, "losses": tuple(values["losses"]), "notes": tuple(values["notes"])}
        found["layers"] = tuple(LayerReport(**_known(LayerReport, layer)) for layer in values["layers"])
        found["shares"] = tuple(GroupShares(**_known(GroupShares, group)) for group in values.get("shares", ()))
        return cls(**_known(cls, found))


def _known(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Those entries that a class has; the others are of a newer version."""
    names = {entry.name for entry in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _parts(group: GroupShares) -> list[float]:
    return [*(getattr(group, fate) for fate in FATES), group.whole]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share else "-"


_NUMBER: tuple[type, ...] = (int, float)
_KINDS: dict[Any, tuple[type, ...]] = {
    **dict.fromkeys(("task", "source", "incoming", "merged"), (str,)),
    "index": (int,),
    **dict.fromkeys(("seconds", "solve_seconds", "kept_fraction"), _NUMBER),
}
_LATER_KINDS: dict[Any, tuple[type, ...]] = {
    **dict.fromkeys(("path", "revision", "time", "version"), (str, type(None))),
    **dict.fromkeys(("response", "drift", "leading"), (*_NUMBER, type(None))),
    "scale": _NUMBER,
}
"""Entries that reports of earlier versions lack."""
_LAYER_KINDS: dict[Any, tuple[type, ...]] = {
    "layer": (str,),
    **dict.fromkeys(("kept_fraction", "task_norm", "update_norm"), _NUMBER),
    **dict.fromkeys(("loss_first", "loss_last"), (*_NUMBER, type(None))),
}
_SHARE_KINDS: dict[Any, tuple[type, ...]] = {"group": (str,), **dict.fromkeys(FATES, _NUMBER)}
"""What stands in a report that is read from a file."""


def _require_kinds(values: dict[Any, Any], kinds: dict[Any, tuple[type, ...]]) -> None:
    odd = [name for name, kind in kinds.items() if type(values[name]) not in kind]
    if odd:
        raise ValueError(f"`{odd[0]}` is {str(values[odd[0]])[:100]!r}")


def layer_rows(stack: Stack, result: StackResult) -> list[LayerReport]:
    """One report per layer of a stack; synchronises the device a few times, after the stack's work is queued."""
    count = len(stack.layers)
    kept = [1.0] * count if result.kept_fraction is None else result.kept_fraction.tolist()
    first, last = (None, None) if result.losses is None else (result.losses[0].tolist(), result.losses[-1].tolist())
    taken = [1.0] * count if result.taken is None else result.taken.tolist()
    recovered = [0.0] * count if result.recovered is None else result.recovered.tolist()
    task_norms, update_norms = distances(stack.incoming, stack.pretrained), distances(result.merged, stack.merged)
    return [
        LayerReport(
            layer=stack.layers[row],
            kept_fraction=kept[row],
            loss_first=None if first is None else first[row],
            loss_last=None if last is None else last[row],
            task_norm=task_norms[row],
            update_norm=update_norms[row],
            taken=taken[row],
            recovered=recovered[row],
        )
        for row in range(count)
    ]


def leading_of(rows: Sequence[LayerReport]) -> float | None:
    """Share of the change in leading directions, over those layers that were looked at; ``None`` if none was.

    Example:
        >>> one = LayerReport("a", 1.0, None, None, task_norm=1.0, update_norm=1.0, leading=0.5)
        >>> two = LayerReport("b", 1.0, None, None, task_norm=3.0, update_norm=1.0, leading=0.3)
        >>> round(leading_of([one, two]), 6)  # (0.5 * 1 + 0.3 * 9) / 10
        0.32
    """
    pairs = [(row.leading * row.task_norm**2, row.task_norm**2) for row in rows if row.leading is not None]
    return share_inside(pairs)


def whole_row(parts: list[tuple[float, LayerReport]]) -> LayerReport:
    """The report of a layer that was folded in parts, each with its share of the entries.

    Example:
        >>> half = LayerReport("x", 0.5, None, None, task_norm=3.0, update_norm=0.0, taken=0.5, recovered=0.0)
        >>> rest = LayerReport("x", 1.0, None, None, task_norm=4.0, update_norm=2.0, taken=1.0, recovered=0.0)
        >>> whole = whole_row([(0.5, half), (0.5, rest)])
        >>> whole.kept_fraction, whole.task_norm, whole.update_norm, whole.taken  # (9 / 2 + 16) / 25
        (0.75, 5.0, 2.0, 0.82)
    """
    rows = [row for _, row in parts]
    whole = sum(row.task_norm**2 for row in rows)

    def share(of: str) -> float:
        sizes = sum(row.task_norm**2 * (getattr(row, of) or 0.0) for row in rows)
        return sizes / whole if whole else float(getattr(rows[0], of) or 0.0)

    return LayerReport(
        layer=rows[0].layer,
        kept_fraction=sum(share * row.kept_fraction for share, row in parts),
        loss_first=None,
        loss_last=None,
        task_norm=math.hypot(*(row.task_norm for row in rows)),
        update_norm=math.hypot(*(row.update_norm for row in rows)),
        taken=share("taken"),
        recovered=share("recovered"),
    )
