"""The layout of the package: every room stands on a floor, and imports only go down.

All imports count, also those inside of functions and those for type checkers alone.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "safemerge_pl"

FLOORS = (
    ("__main__", "cli"),
    ("commands",),
    ("callbacks", "hf_trainer"),
    ("study", "module", "live"),
    ("merger", "scoring"),
    ("output", "data"),
    ("folding", "backbones"),
    ("methods", "checkpoints", "reports"),
    ("maths", "architectures", "metrics"),
    ("runtime", "functional", "zoo"),
    ("errors", "version"),
)
"""From top to bottom; docs/architecture.md draws the same."""

LOW = 7
"""Floors from the ground up on which a fold works: heavy libraries are imported there inside of functions only."""

HEAVY = {
    "lightning",
    "torchmetrics",
    "transformers",
    "datasets",
    "open_clip",
    "peft",
    "matplotlib",
    "jsonargparse",
    "tensorboard",
}
MAY_BE_HEAVY = {"scoring", "data", "backbones", "metrics"}


def _modules() -> dict[str, Path]:
    """Every module by its dotted name inside of the package; "" is the package's face."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[:2] != ("zoo", "files"):
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()
FLOOR = {room: len(FLOORS) - place for place, rooms in enumerate(FLOORS) for room in rooms}


def _room(module: str) -> str:
    return module.partition(".")[0]


def _imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what a module imports, as far down as they name modules of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they lead"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner.removeprefix("safemerge_pl.") in MODULES else node.module


def _ours(module: str) -> set[str]:
    names = {name for name in _imports(ast.parse(MODULES[module].read_text())) if _room(name) == "safemerge_pl"}
    return {name.removeprefix("safemerge_pl").removeprefix(".") for name in names}


EDGES = {module: _ours(module) for module in MODULES}
INNER = sorted(set(MODULES) - {""})


def test_every_room_stands_on_a_floor() -> None:
    assert {_room(module) for module in INNER} == set(FLOOR)


def _is_lower(other: str, module: str) -> bool:
    above, below = _room(module), _room(other)
    return above == below or FLOOR[below] < FLOOR[above] or (above, below) == ("__main__", "cli")


@pytest.mark.parametrize("module", INNER)
def test_imports_go_down(module: str) -> None:
    wrong = [other for other in EDGES[module] if other and not _is_lower(other, module)]
    assert not wrong, f"{module} (floor {FLOOR[_room(module)]}) imports {', '.join(wrong)}, which stands no lower"


def test_nobody_imports_the_face() -> None:
    assert [module for module in INNER if "" in EDGES[module]] == []


def test_no_room_imports_its_own_face() -> None:
    """What a room shows to others is gathered from its files; a file that imports it would close a circle."""
    assert [module for module in INNER if "." in module and _room(module) in EDGES[module]] == []


def test_there_is_no_circle() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above[above.index(module) :], module))
        if module not in done:
            for other in EDGES.get(module, ()):
                visit(other, (*above, module))
            done.add(module)

    for module in INNER:
        visit(module, ())


@pytest.mark.parametrize("module", [module for module in INNER if FLOOR[_room(module)] <= LOW])
def test_a_fold_waits_for_no_heavy_library(module: str) -> None:
    if _room(module) in MAY_BE_HEAVY:
        return
    top = ast.parse(MODULES[module].read_text()).body
    names = {_room(name) for node in top if isinstance(node, ast.Import | ast.ImportFrom) for name in _imports(node)}
    assert not names & HEAVY
