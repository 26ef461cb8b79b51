"""Let a configuration name classes of a Python file that lies beside it."""

import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["find_modules_beside"]

_CLASS = re.compile(r"([A-Za-z_]\w*)(?:\.\w+)*\.[A-Za-z_]\w*")
_CLASS_PATH = re.compile(rf"\bclass_path[\"']?\s*:\s*[\"']?{_CLASS.pattern}")


class _Beside:
    """Finds the top-level modules that were named, and nothing else, where nobody else finds them.

    The whole folder on ``sys.path`` would also offer whatever else lies there to every library that tries an import.
    """

    def __init__(self, places: dict[str, Path]) -> None:
        self.places = places

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the import system asks for it."""
        place = self.places.get(name)
        return None if place is None else PathFinder.find_spec(name, [str(place)])


def find_modules_beside(argv: Sequence[str]) -> None:
    """Make modules importable that the configurations or options of a command line name by ``class_path``.

    A module is looked for in the folder of the configuration that names it, or in the current folder if an option
    does, after all other places. Nothing is imported here.

    Args:
        argv: arguments of a command line, with configurations as paths.
    """
    places: dict[str, Path] = {}
    for option, value in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, own = option.partition("=")
        given = own if equals else value
        if name in ("--config", "-c"):
            file = Path(given)
            for module in _named_in(file):
                places.setdefault(module, file.resolve().parent)
        elif name.startswith("--") and (match := _CLASS.fullmatch(given)) is not None:
            places.setdefault(match[1], Path.cwd())
    here = {
        module: place
        for module, place in places.items()
        if (place / f"{module}.py").is_file() or (place / module / "__init__.py").is_file()
    }
    if here:
        sys.meta_path.append(_Beside(here))


def _named_in(file: Path) -> list[str]:
    """Top-level modules of the class paths in a configuration."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []  # whoever reads the configuration says what is wrong with it
    return [match[1] for match in _CLASS_PATH.finditer(text)]
