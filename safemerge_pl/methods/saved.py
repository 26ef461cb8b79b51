"""Turn a merge method into the plain values that a saved merge holds, and back."""

import json
from collections.abc import Mapping
from typing import Any

from safemerge_pl.errors import CheckpointError
from safemerge_pl.methods.base import MergeMethod
from safemerge_pl.runtime.classes import build_stored, own_path, stored_class

__all__ = ["describe_method", "rebuild_method", "require_plain_settings", "require_same_method", "restore_method"]


def describe_method(method: MergeMethod) -> dict[str, Any]:
    """Describe a method by its class, settings and state.

    Example:
        >>> from safemerge_pl.methods import TaskArithmetic
        >>> describe_method(TaskArithmetic(scaling=0.5))["class_path"]
        'safemerge_pl.methods.task_arithmetic.TaskArithmetic'
    """
    return {
        "class_path": own_path(type(method)),
        "init_args": method.settings(),
        "state": method.state_dict(),
    }


def require_plain_settings(method: MergeMethod) -> None:
    """Refuse settings that could not be written into a state file or ledger, before anything is folded with them.

    Raises:
        ValueError: naming the method, and the setting that is not a plain finite value.
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
    """A method of this package from what :func:`describe_method` gave; nothing that it names is imported.

    Args:
        saved: the description; the state in it is left alone.

    Raises:
        CheckpointError: for a method of another package, and for anything that is no method.

    Example:
        >>> from safemerge_pl.methods import TaskArithmetic
        >>> rebuild_method(describe_method(TaskArithmetic(scaling=0.5)))
        TaskArithmetic(scaling=0.5)
    """
    path, init_args, _ = _parts(saved)
    if not path.startswith("safemerge_pl.methods."):
        raise CheckpointError(f"the merge was made with {path}; pass that method as `method`.")
    kind = stored_class(path, MergeMethod, "the saved merge", remedy="pass the right method as `method`")  # type: ignore[type-abstract]
    return build_stored(kind, init_args, "the saved merge")


def require_same_method(method: MergeMethod, saved: Mapping[str, Any]) -> None:
    """Refuse to continue a merge with another method, or with other settings.

    Args:
        method: the one to continue with.
        saved: what :func:`describe_method` gave for the earlier one.

    Raises:
        CheckpointError: naming every setting that differs.
    """
    mine = describe_method(method)
    path, then, _ = _parts(saved)
    now = mine["init_args"]
    if mine["class_path"] != path:
        raise CheckpointError(f"the merge was made with {path}, not with {mine['class_path']}.")
    changed = [
        f"{key}: {then.get(key)} then, {now.get(key)} now"
        for key in sorted(now.keys() | then.keys())
        if now.get(key) != then.get(key)
    ]
    if changed:
        raise CheckpointError(f"the merge was made with other settings ({'; '.join(changed)}); use the same ones.")


def restore_method(method: MergeMethod, saved: Mapping[str, Any]) -> None:
    """Give a method the state of the earlier one.

    Args:
        method: the one to continue with, which is the same as the earlier one.
        saved: what :func:`describe_method` gave for the earlier one.

    Raises:
        CheckpointError: if the method does not take that state.
    """
    _, _, state = _parts(saved)
    try:
        method.load_state_dict(state)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"the state of {type(method).__name__} in the saved merge is damaged ({type(error).__name__}: {error}); "
            "fold again from the last whole output."
        ) from error


def _parts(saved: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Class path, settings and state of a description."""
    parts = [saved.get(key) for key in ("class_path", "init_args", "state")] if isinstance(saved, Mapping) else [None]
    if [type(part) for part in parts] != [str, dict, dict]:
        raise CheckpointError("the saved merge does not say what it was made with; fold again from the last whole one.")
    return parts[0], parts[1], parts[2]  # type: ignore[return-value]
