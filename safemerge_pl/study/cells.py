"""Cells of a study, and the rows of its table that they come from."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.folding.bound import MaxResponse, bound_settings, choose_bound, require_drift_bound
from safemerge_pl.methods import MergeMethod
from safemerge_pl.runtime.names import did_you_mean, name_list

__all__ = ["Cell", "StudyRow"]


@dataclass
class StudyRow:
    """A method and the settings it is tried with.

    Args:
        label: name in tables and figures.
        method: the method with its fixed settings.
        vary: values of settings; every combination is measured. ``max_response`` and ``max_drift`` may be among them,
            as in ``at``.
        at: settings that differ by stream: name of the stream -> setting -> value.
        max_response: bound on the response of what is merged, see :class:`~safemerge_pl.merger.ContinualMerger`.
        max_drift: bound on the drift, likewise.
        layers: shell-style patterns of the parameters to merge, instead of the built-in choice.

    Raises:
        ValueError: if ``layers`` is no list of names.
    """

    label: str
    method: MergeMethod
    vary: dict[str, list[Any]] = field(default_factory=dict)
    at: dict[str, dict[str, Any]] = field(default_factory=dict)
    max_response: MaxResponse = "auto"
    max_drift: float | None = None
    layers: list[str] | str | None = None

    def __post_init__(self) -> None:
        self.layers = None if self.layers is None else name_list(self.layers, "layers")

    def methods(self, stream: str) -> Iterator[tuple[dict[str, Any], MergeMethod, float | None, float | None]]:
        """Varied settings, the method with them, fresh each time, and the bounds on response and drift.

        Raises:
            MisconfigurationException: if the method has no such setting, or refuses a value.
        """
        grid = [each if isinstance(each, (list, tuple)) else [each] for each in self.vary.values()]
        settings = [*self.method.settings(), "max_response", "max_drift"]
        for name in (*self.vary, *(name for given in self.at.values() for name in given)):
            if name not in settings:
                raise MisconfigurationException(
                    f"row '{self.label}': {type(self.method).__name__} has no setting '{name}'; "
                    f"{did_you_mean(name, settings)}"
                )
        for values in itertools.product(*grid):
            varied = dict(zip(self.vary, values, strict=True))
            changes = {**self.at.get(stream, {}), **varied}
            try:
                bound: MaxResponse = changes.pop("max_response", self.max_response)
                max_drift: float | None = changes.pop("max_drift", self.max_drift)
                require_drift_bound(max_drift)
                method: MergeMethod = dataclasses.replace(self.method, **changes)  # type: ignore[type-var]
                yield varied, method, choose_bound(method, bound), max_drift
            except (TypeError, ValueError) as error:
                raise MisconfigurationException(f"row '{self.label}': {error}") from error


@dataclass(frozen=True)
class Cell:
    """One stream in one order by one method."""

    row: str
    stream: str
    order: int | None
    varied: dict[str, Any]
    method: MergeMethod
    max_response: float | None = None
    max_drift: float | None = None
    layers: Sequence[str] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the method, and bounds and layers where given; files of results without them keep their names."""
        layers = {} if self.layers is None else {"layers": list(self.layers)}
        return {**self.method.settings(), **bound_settings(self.max_response, self.max_drift), **layers}
