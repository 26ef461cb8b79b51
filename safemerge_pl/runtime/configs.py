"""Find the configurations that are shipped with the package."""

from collections.abc import Sequence
from pathlib import Path

from safemerge_pl.runtime.files import local_path

__all__ = ["config_folder", "resolve_configs"]

_PACKAGE = Path(__file__).parent.parent


def config_folder() -> Path:
    """Folder of the shipped configurations: package data, or ``configs/`` of a checkout.

    Example:
        >>> (config_folder() / "quickstart.yaml").is_file()
        True
    """
    packaged = _PACKAGE / "configs"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "configs"


def resolve_configs(argv: Sequence[str]) -> list[str]:
    """Replace ``--config NAME`` by the shipped file of that name where there is no such file here.

    Args:
        argv: arguments of a command line.

    Returns:
        The arguments with every ``--config NAME``, ``-c NAME`` and ``--config=NAME`` resolved.

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
    local = local_path(name)
    if local.exists():
        return str(local)
    packaged = config_folder() / name
    return str(packaged) if packaged.is_file() else name
