"""What the site needs beyond mkdocs: equations as MathML, and the Sphinx roles that docstrings are written with.

Browsers draw MathML by themselves, so the pages load no script and no font for their equations.
"""

import html
import re
from collections.abc import Iterator
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.plugins import get_plugin_logger

log = get_plugin_logger("docs.hooks")

_ROLE = re.compile(r":(?P<role>class|meth|func|attr|mod|exc|data):`(?:(?P<text>[^`<]+) <)?(?P<target>[^`>]+)>?`")
_MATH = re.compile(r":math:`(?P<tex>[^`]+)`")
_BLOCK = re.compile(r"^(?P<indent> *)\.\. math::[ ]*(?P<first>.*)(?P<rest>(?:\n(?:(?P=indent) +.*)?)*)", re.MULTILINE)
_CODE = re.compile(r"::$(?=\n\n? +\S)", re.MULTILINE)
_EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<kind>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)

_WORD = re.compile(r"([_^])\{([a-z]{3,})\}")


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Replace each equation of a finished page by MathML."""

    def draw(match: re.Match[str]) -> str:
        tex = _WORD.sub(r"\1{\\mathrm{\2}}", html.unescape(match["tex"]).strip())  # a word is no product of its letters
        try:
            drawn = convert(tex, display="block" if match["kind"] == "[" else "inline")
        except Exception as error:
            log.warning(f"{page.file.src_path}: the equation {tex!r} cannot be read: {error!r}")
            return match[0]
        if "\\" in re.sub(r"<[^>]+>", "", drawn):  # an unknown command is passed through as text
            log.warning(f"{page.file.src_path}: the equation {tex!r} holds an unknown command")
        return f'<{match["tag"]} class="equation">{drawn}</{match["tag"]}>'

    return _EQUATION.sub(draw, content)


class SphinxRoles(griffe.Extension):
    """Turn the roles and directives of the docstrings into Markdown; a role that names nothing fails a strict build."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Once everything is loaded, so that every name can be resolved."""
        for member in pkg.members.values():
            if not member.is_alias and member.is_module:
                member.exports = None  # what a room gathers from its files is shown in the files' own sections
        self._visit(pkg)

    def _visit(self, item: Any) -> None:
        if item.docstring is not None:
            item.docstring.value = _to_markdown(item.docstring.value, item)
        for member in item.members.values():
            if not member.is_alias:
                self._visit(member)


def _to_markdown(text: str, item: Any) -> str:
    def link(match: re.Match[str]) -> str:
        target = match["target"].lstrip("~")
        path = _resolve(target, item)
        if path is None:
            log.warning(f"{item.path}: nothing is called '{target}'")
        shown = f"<code>{match['text'] or target}</code>"
        return shown if path is None else f'<autoref identifier="{path}" optional>{shown}</autoref>'

    def block(match: re.Match[str]) -> str:
        lines = [match["first"], *match["rest"].splitlines()]
        tex = " ".join(line.strip() for line in lines if line.strip())
        after = "\n" if match["rest"].endswith("\n") else ""
        return f"{match['indent']}$$\n{match['indent']}{tex}\n{match['indent']}$$\n{after}"

    text = _BLOCK.sub(block, text)
    text = _MATH.sub(lambda match: f"${match['tex']}$", text)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)  # the heading whose doctests are shown as code
    return _CODE.sub(":", _ROLE.sub(link, text))


def _resolve(target: str, item: Any) -> str | None:
    """Full path of what a role names: by its whole path, as seen from the docstring, or as the only one of its name."""
    package = item.package
    if target.partition(".")[0] == package.name:
        name = target.partition(".")[2]
        return _member(package, name) if name else str(package.path)
    scope: Any = item
    while scope is not None:
        found = _member(scope, target)
        if found is not None:
            return found
        scope = scope.parent
    everywhere = {found for module in _modules(package) if (found := _member(module, target)) is not None}
    return everywhere.pop() if len(everywhere) == 1 else None


def _member(scope: Any, dotted: str) -> str | None:
    found = scope
    try:
        for part in dotted.split("."):
            found = found.all_members[part]
        return str(found.canonical_path)
    except (KeyError, AttributeError, griffe.GriffeError):
        return None


def _modules(module: Any) -> Iterator[Any]:
    yield module
    for member in module.members.values():
        if not member.is_alias and member.is_module:
            yield from _modules(member)
