"""Find the configurations that are shipped with the package."""

from collections.abc import Sequence
from pathlib import Path

from safemerge_pl.runtime.files import local_path
from safemerge_pl.runtime.names import did_you_mean, nearest

__all__ = ["append_repeated", "config_folder", "packaged_configs", "resolve_configs"]

_LISTS = (
    "incoming",
    "task",
    "tasks",
    "controls",
    "layers",
    "experts",
    "orders",
    "sets",
    "rows",
    "figures",
    "y",
    "callbacks",
    "templates",
)
"""Options that take a list, wherever they stand in a configuration."""

_PACKAGE = Path(__file__).parent.parent


def config_folder() -> Path:
    """Folder of the shipped configurations: package data, or ``configs/`` of a checkout.

    Example:
        >>> (config_folder() / "quickstart.yaml").is_file()
        True
    """
    packaged = _PACKAGE / "configs"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "configs"


def packaged_configs() -> list[str]:
    """File names of the shipped configurations, sorted.

    Example:
        >>> "quickstart.yaml" in packaged_configs()
        True
    """
    return sorted(path.name for path in config_folder().glob("*.yaml"))


def resolve_configs(argv: Sequence[str]) -> list[str]:
    """Replace ``--config NAME`` by the shipped file of that name, ``.yaml`` or not, where there is no such file here.

    Args:
        argv: arguments of a command line.

    Returns:
        The arguments with every ``--config NAME``, ``-c NAME`` and ``--config=NAME`` resolved.

    Raises:
        ValueError: if there is no such file in either place, with the nearest name of those that come along.

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


def append_repeated(argv: Sequence[str]) -> list[str]:
    """Let a list option that is given several times mean all of its values; any other option keeps its last one.

    Args:
        argv: arguments of a command line.

    Returns:
        The arguments with ``--option+`` (append) in the place of every ``--option`` but the first.

    Example:
        >>> append_repeated(["fold", "--incoming", "a", "--incoming=b", "--dtype", "same", "--dtype", "float32"])
        ['fold', '--incoming', 'a', '--incoming+=b', '--dtype', 'same', '--dtype', 'float32']
    """
    appended, seen = [], set()
    for argument in argv:
        option, equals, value = argument.partition("=")
        name = option.removesuffix("+")
        if name.startswith("--") and name.rpartition(".")[2].lstrip("-") in _LISTS:
            argument = f"{name}+{equals}{value}" if name in seen else argument
            seen.add(name)
        appended.append(argument)
    return appended


def _find_config(name: str) -> str:
    local = local_path(name)
    if local.exists():
        return str(local)
    for packaged in (config_folder() / name, config_folder() / f"{name}.yaml"):
        if packaged.is_file():
            return str(packaged)
    if any(letter in name for letter in "{:\n"):  # a configuration itself, in place of the name of one
        return name
    known = packaged_configs()
    also = "" if nearest(name, known) is None else f" There are {', '.join(known)}."
    raise ValueError(
        f"there is no configuration {name} here, and none of this name comes along; {did_you_mean(name, known)}{also}"
    )
