"""The configurations that come along, found by their bare names."""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["config_folder", "resolve_configs"]


def config_folder() -> Path:
    """The configurations that come along: package data, or ``configs/`` of a checkout."""
    packaged = Path(__file__).parents[1] / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "configs"


def resolve_configs(argv: Sequence[str]) -> list[str]:
    """Replace ``--config NAME`` by the packaged file of that name where there is no such file here.

    Example:
        >>> Path(resolve_configs(["fit", "--config", "quickstart.yaml"])[2]).parent.name
        'configs'
    """
    resolved = list(argv)
    for place, argument in enumerate(resolved):
        if argument in ("--config", "-c") and place + 1 < len(resolved):
            resolved[place + 1] = _find_config(resolved[place + 1])
        elif argument.startswith("--config="):
            resolved[place] = "--config=" + _find_config(argument.removeprefix("--config="))
    return resolved


def _find_config(name: str) -> str:
    packaged = config_folder() / name
    return str(packaged) if not Path(name).exists() and packaged.is_file() else name
