"""The section ``merge`` of a configuration: settings of the merge callback, whatever other callbacks there are."""

from argparse import SUPPRESS, Action
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from safemerge_pl.callbacks import MergeCallback, SAFEMergeCallback
from safemerge_pl.runtime.classes import own_path, subclasses

__all__ = ["add_merge_section", "take_merge_section"]

_SECTION = "merge"


def add_merge_section(parser: ArgumentParser) -> None:
    """Add options for the settings of the merge callback; those that are not given say nothing.

    Args:
        parser: of a verb.
    """
    parser.add_class_arguments(SAFEMergeCallback, _SECTION, instantiate=False)
    for action in parser._actions:
        if action.dest == _SECTION:
            action.help = "A file of these settings; what it leaves out is as trainer.callbacks says, or the default."
        if action.dest == _SECTION or action.dest.startswith(f"{_SECTION}."):
            _show_default(action)
            action.default = SUPPRESS


def _show_default(action: Action) -> None:
    """Write the default into the help, as the parser does for options that are not suppressed."""
    if action.default != SUPPRESS:
        default = "null" if action.default is None else action.default
        action.help = f"{action.help} (type: %(type)s, default: {default})"


def take_merge_section(config: Namespace) -> None:
    """Put the section's settings into the merge callback of the trainer, which is added if there is none.

    Args:
        config: of a verb; changed in place.
    """
    given = config.pop(_SECTION, None)
    settings = dict(vars(given)) if isinstance(given, Namespace) else dict(given or {})
    if not settings:
        return
    callbacks = config["trainer"].get("callbacks")
    entries: list[Any] = [] if callbacks is None else callbacks if isinstance(callbacks, list) else [callbacks]
    entry = next((found for found in entries if _is_merge(found)), None)
    if entry is None:
        entry = _namespace(class_path=own_path(SAFEMergeCallback), init_args=_namespace())
        entries = [*entries, entry]
    init_args = entry.get("init_args")
    if init_args is None:
        init_args = entry["init_args"] = _namespace()
    for name, value in settings.items():
        init_args[name] = value
    config["trainer"]["callbacks"] = entries


def _namespace(**values: Any) -> Namespace:
    return Namespace(**values)  # type: ignore[no-untyped-call]


def _is_merge(entry: Any) -> bool:
    kinds: list[type] = [MergeCallback, *subclasses(MergeCallback)]
    names = {kind.__name__ for kind in kinds}
    return isinstance(entry, Namespace) and str(entry.get("class_path")).rpartition(".")[2] in names
