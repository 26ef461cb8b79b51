"""Find the fine-tuned model of each task."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.checkpoints.open import Source
from safemerge_pl.runtime.files import local_path
from safemerge_pl.runtime.names import name_list
from safemerge_pl.zoo import FILES

__all__ = ["Experts", "find_experts"]

Experts = str | Sequence[str] | Mapping[str, Any]
"""``"zoo"``, a folder, a path with ``{task}``, a list of these, or a mapping from task to model."""


def find_experts(experts: Experts, tasks: str | Sequence[str]) -> dict[str, Source]:
    """The model of each task, in the order of ``tasks``.

    Raises:
        MisconfigurationException: with every task that has no model, and where it was looked for.

    Example:
        >>> find_experts("zoo", ["mnist"])["mnist"].name, find_experts({"a": "some/folder"}, ["a"])
        ('mnist', {'a': 'some/folder'})
    """
    tasks = name_list(tasks, "tasks")
    if isinstance(experts, Mapping):
        missing = [task for task in tasks if task not in experts]
        if missing:
            raise MisconfigurationException(
                f"`experts` names no model for {', '.join(missing)}; it has {', '.join(map(str, experts))}."
            )
        return {task: experts[task] for task in tasks}
    places = name_list(experts, "experts")
    found: dict[str, Source] = {}
    problems = []
    for task in tasks:
        candidates = [_candidate(place, task) for place in places]
        existing = [path for path in candidates if isinstance(path, str) or path.exists()]
        if existing:
            found[task] = existing[0]
        else:
            problems.append(f"task '{task}' has no model: {' and '.join(str(path) for path in candidates)} not found.")
    if problems:
        raise MisconfigurationException("\n".join(problems))
    return found


def _candidate(place: str, task: str) -> Path | str:
    """Where a place keeps a task's model; a string that is no local path is left to the hub."""
    if place == "zoo":
        return FILES / "experts" / task
    if "{task}" in place:
        path = local_path(place.replace("{task}", task))
        looks_local = path.exists() or path.is_absolute() or place.startswith((".", "~")) or place.count("/") != 1
        return path if looks_local or path.parent.exists() else place.replace("{task}", task)
    return local_path(place) / task
