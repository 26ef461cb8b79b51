"""What README and the documentation show: it runs as it stands, and the site builds without a warning.

A comment before a block says what it needs that a test has not: ``<!-- needs: hub -->``. Such a block is still parsed.
"""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from command_line import python

from safemerge_pl.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(
    r"^(?:<!-- needs: (?P<needs>[\w ]+) -->\n)?```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    kind: str
    code: str
    needs: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    assert text.count("```") % 2 == 0, f"{page}: a block is not closed"
    found = 0
    for match in _BLOCK.finditer(text):
        found += 1
        line = text.count("\n", 0, match.start("code")) + 1
        yield Block(page, line, match["kind"], match["code"], match["needs"])
    assert found == text.count("```") // 2, f"{page}: a block has no language, or is indented"


BLOCKS = [block for page in PAGES for block in _blocks(page)]


def _some(kind: str) -> list[object]:
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.kind == kind]


def _commands() -> Iterator[object]:
    """Every ``safemerge`` command of the shell blocks, also behind a launcher, as its arguments."""
    for block in BLOCKS:
        if block.kind != "bash":
            continue
        for place, line in enumerate(block.code.replace("\\\n", "").splitlines()):
            if re.match(r"safemerge|torchrun|fabric|python -m safemerge_pl", line):
                words = shlex.split(line, comments=True)
                start = next(word for word in ("safemerge", "safemerge_pl", "safemerge_pl/cli.py") if word in words)
                yield pytest.param(words[words.index(start) + 1 :], id=f"{block}+{place}")


def test_only_known_kinds_of_blocks() -> None:
    assert {block.kind for block in BLOCKS} == {"python", "bash", "yaml", "text"}
    assert {block.needs for block in BLOCKS} - {None} <= {"hub", "minutes", "checkout", "your module"}


@pytest.mark.parametrize("block", _some("python"))
def test_python_is_python(block: Block) -> None:
    ast.parse(block.code, str(block))


@pytest.mark.parametrize("block", _some("bash"))
def test_shell_is_shell(block: Block) -> None:
    subprocess.run(["bash", "-n", "-c", block.code], check=True)


@pytest.mark.parametrize("arguments", list(_commands()))
def test_the_command_line_takes_it(arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS:
        if block.kind == "yaml" and "merge_method" in block.code:
            Path("recipe.yml").write_text(block.code)
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--print_config"])
    assert end.value.code in (0, None)


@pytest.mark.parametrize("block", _some("yaml"))
def test_configurations_are_taken(block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A part of a configuration is laid over the quickstart's, a study stands by itself, a set or a recipe is read."""
    content = yaml.safe_load(block.code)
    monkeypatch.chdir(tmp_path)
    Path("block.yaml").write_text(block.code)
    if "templates" in content:
        from safemerge_pl.data.image_sets import find_spec

        assert find_spec("block", str(tmp_path)).classes
        return
    if "merge_method" in content:
        from safemerge_pl.commands.recipe import read_recipe

        assert read_recipe("block.yaml") is not None
        return
    verb = ["study"] if "rows" in content else ["fit", "--config", "quickstart.yaml"]
    with pytest.raises(SystemExit) as end:
        main([*verb, "--config", "block.yaml", "--print_config"])
    assert end.value.code in (0, None)


_RUN = """
import json, subprocess, sys
space = {"__name__": "__main__"}
for kind, page, line, code in json.loads(sys.argv[1]):
    print(f"{page}:{line}", flush=True)
    if kind == "python":
        exec(compile("\\n" * (line - 1) + code, page, "exec"), space)
    else:
        subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True)
"""


def _runnable(page: Path) -> list[Block]:
    return [block for block in BLOCKS if block.page == page and block.kind in ("python", "bash") and not block.needs]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if _runnable(page)]
)
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    """In one folder and one process, as a reader would type it; with the package of this checkout."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, options in (("python", ""), ("safemerge", "-m safemerge_pl ")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.join(python())} {options}"$@"\n')
        (programs / name).chmod(0o755)
    env = os.environ | {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "SAFEMERGE_CACHE": "",
    }
    blocks = [(block.kind, str(block.page), block.line, block.code) for block in _runnable(page)]
    folder = tmp_path / "work"
    folder.mkdir()
    run = subprocess.run(
        [*python(), "-c", _RUN, json.dumps(blocks)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def _cells(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table after a heading."""
    table = re.search(rf"^## {heading}$.*?^\|[-:| ]+\|\n(?P<rows>(?:\|[^\n]*\n)+)", text, re.MULTILINE | re.DOTALL)
    assert table is not None
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table["rows"].splitlines()]


def test_the_drawing_of_the_floors_is_the_one_that_is_tested() -> None:
    tree = ast.parse((ROOT / "tests" / "test_floors.py").read_text())
    (tested,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FLOORS"
    )
    rows = _cells((ROOT / "docs" / "architecture.md").read_text(), "The floors")
    assert [int(row[0]) for row in rows] == list(range(len(tested), 0, -1))
    assert [tuple(re.findall(r"`(\w+)`", row[1])) for row in rows] == list(tested)


def test_every_room_is_in_the_reference() -> None:
    shown = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = {path.partition(".")[0] for path in re.findall(r"^::: safemerge_pl\.([\w.]+)", shown, re.MULTILINE)}
    rooms = {path.stem for path in (ROOT / "safemerge_pl").iterdir() if path.suffix == ".py" or path.is_dir()}
    face = {"ContinualMerger", "LiveMerger", "FoldReport"}
    assert rooms - named <= {"__init__", "__main__", "__pycache__", "live", "version"}, "live is shown by its class"
    assert face <= named


def test_what_the_table_says_is_touched_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    places = [
        place for row in _cells(text, "What to touch to add") for place in re.findall(r"`([\w/]+(?:/|\.py))`", row[1])
    ]
    assert len(places) > 10
    assert [place for place in places if not (ROOT / "safemerge_pl" / place).exists()] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install '.[dev]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    loaded = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"')
    assert {found for page in pages for found in loaded.findall(page.read_text(encoding="utf-8"))} == set(), "offline"
    methods = (tmp_path / "site" / "methods.html").read_text(encoding="utf-8")
    assert methods.count("<math") > 50
    assert "arithmatex" not in methods
