"""A merge method as plain values, and back: what a saved merge knows of its method."""

import importlib
import json
from collections.abc import Mapping
from typing import Any

from safemerge_pl.errors import CheckpointError
from safemerge_pl.methods.base import MergeMethod

__all__ = ["describe_method", "rebuild_method", "require_plain_settings", "require_same_method"]


def describe_method(method: MergeMethod) -> dict[str, Any]:
    """Class, settings and state of a method.

    Example:
        >>> from safemerge_pl.methods import TaskArithmetic
        >>> describe_method(TaskArithmetic(scaling=0.5))["class_path"]
        'safemerge_pl.methods.task_arithmetic.TaskArithmetic'
    """
    return {
        "class_path": f"{type(method).__module__}.{type(method).__qualname__}",
        "init_args": method.settings(),
        "state": method.state_dict(),
    }


def require_plain_settings(method: MergeMethod) -> None:
    """Refuse settings that could not be written into a state file or ledger, before anything is folded with them.

    Raises:
        ValueError: naming the method, and the setting that is no plain finite value.
    """
    for name, value in method.settings().items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`{name}` of {type(method).__name__} is {value!r}, which is no plain finite value ({error}); leave it "
                "out of `settings()`, or give it as a number, text, list or mapping."
            ) from error


def rebuild_method(saved: Mapping[str, Any]) -> MergeMethod:
    """A method of this package from what :func:`describe_method` gave; no other module is ever imported by name.

    Args:
        saved: the description; the state in it is left alone.

    Raises:
        CheckpointError: for a method of another package.

    Example:
        >>> from safemerge_pl.methods import TaskArithmetic
        >>> rebuild_method(describe_method(TaskArithmetic(scaling=0.5)))
        TaskArithmetic(scaling=0.5)
    """
    module, _, name = saved["class_path"].rpartition(".")
    if not module.startswith("safemerge_pl.methods."):
        raise CheckpointError(f"the merge was made with {saved['class_path']}; pass that method as `method`.")
    method: MergeMethod = getattr(importlib.import_module(module), name)(**saved["init_args"])
    return method


def require_same_method(method: MergeMethod, saved: Mapping[str, Any]) -> None:
    """Refuse to continue a merge with another method, or with other settings.

    Args:
        method: the one to continue with.
        saved: what :func:`describe_method` gave for the earlier one.

    Raises:
        CheckpointError: naming every setting that differs.
    """
    mine = describe_method(method)
    if mine["class_path"] != saved["class_path"]:
        raise CheckpointError(f"the merge was made with {saved['class_path']}, not with {mine['class_path']}.")
    changed = [
        f"{key}: {saved['init_args'].get(key)} then, {mine['init_args'].get(key)} now"
        for key in sorted(mine["init_args"].keys() | saved["init_args"].keys())
        if mine["init_args"].get(key) != saved["init_args"].get(key)
    ]
    if changed:
        raise CheckpointError(f"the merge was made with other settings ({'; '.join(changed)}); use the same ones.")
