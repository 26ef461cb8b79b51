"""``completion``: print a script that completes verbs, options and their values in a shell.

The script holds all words, so that the Tab key does not wait for the libraries that they come from.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Literal, get_args

import shtab
from jsonargparse import ArgumentParser

from safemerge_pl.commands import fit, fold, info, study
from safemerge_pl.commands.option_words import Option, list_options
from safemerge_pl.commands.parsers import HintingParser
from safemerge_pl.runtime.configs import packaged_configs

__all__ = ["Shell", "completion_script", "list_verbs", "run"]

Shell = Literal["bash", "zsh", "fish"]

_WORDS_OR_FILES = {
    "bash": '{name}() {{\n  compgen -W "{words}" -- "$1"\n  compgen -f -- "$1"\n}}',
    "zsh": "{name}() {{\n  _alternative 'words:value:({words})' 'files:file:_files'\n}}",
    "fish": "function {name}\n  string split ' ' '{words}'\n  __fish_complete_path (commandline -ct)\nend",
}
"""A function of each shell that offers words as well as files."""

_MORE_WORDS = {
    "--ckpt_path": ("last",),
    "--trainer.accelerator": ("auto", "cpu", "gpu"),
    "--trainer.strategy": ("auto", "ddp"),
}
"""Values that are plain text to a parser."""

_QUIET = Option(("-q", "--quiet"), (), False, 0, "tell problems only")


def run() -> None:
    """Print the script for a shell; for the user's own where none is named."""
    print(completion_script(_make_parser().parse_args(sys.argv[2:]).shell))


def _make_parser() -> HintingParser:
    parser = HintingParser(prog="safemerge completion", description="Complete verbs, options and values in a shell.")
    own = Path(os.environ.get("SHELL", "")).name
    default = own if own in get_args(Shell) else "bash"
    parser.add_argument("shell", nargs="?", type=Shell, default=default, help="the shell; yours if left out")
    return parser


def completion_script(shell: Shell) -> str:
    """Write what a shell must read to complete ``safemerge``.

    Args:
        shell: the shell.
    """
    functions: dict[str, str] = {}
    root = argparse.ArgumentParser(prog="safemerge")
    root.add_argument("--version", action="version", help="print the version")
    _add_option(root, _QUIET, shell, functions)
    verbs = root.add_subparsers()
    for verb, (told, options) in list_verbs().items():
        parser = verbs.add_parser(verb, help=told, add_help=False)
        for option in (_QUIET, *options):
            _add_option(parser, option, shell, functions)
    bodies = [_WORDS_OR_FILES[shell].format(name=name, words=words) for words, name in functions.items()]
    return shtab.complete(root, shell, preamble="\n".join(bodies))


def list_verbs() -> dict[str, tuple[str, list[Option]]]:
    """Give all verbs, with what each does and its options."""
    streams = fit.make_parsers()
    parsers: dict[str, ArgumentParser] = {
        **streams,
        "fold": fold.make_parser(),
        "study": study.make_parser(),
        "info": info.make_parser(),
        "completion": _make_parser(),
    }
    verbs = {verb: (parser.description or "", _options(verb, parser)) for verb, parser in parsers.items()}
    name = Option((), tuple(packaged_configs()), False, "?", "its name")
    verbs["config"] = ("Print a configuration that comes along.", [name])
    verbs["check"] = ("List every problem of a configuration, in seconds.", verbs["fit"][1])
    return verbs


def _options(verb: str, parser: ArgumentParser) -> list[Option]:
    """Options of a verb, with what its parser does not know."""
    more = dict(_MORE_WORDS)
    if verb not in ("fold", "info"):
        more["--config"] = tuple(each for each in packaged_configs() if each.startswith("study") == (verb == "study"))
    options = []
    for option in list_options(parser):
        words = [word for name in option.names for word in more.get(name, ())]
        options.append(option._replace(words=(*words, *option.words)))
    if verb == "fold":  # where a setting of the method may stand by itself
        known = {name for option in options for name in option.names}
        alone = [
            option._replace(names=(option.names[-1].replace("--method.", "--"),)) for option in options if option.names
        ]
        options += [option for option in alone if option.names[0] not in known]
    return options


def _add_option(parser: argparse.ArgumentParser, option: Option, shell: Shell, functions: dict[str, str]) -> None:
    """Give a plain parser an option of the same words, with what shtab needs to complete them.

    Args:
        parser: of a verb.
        option: to be added.
        shell: that will complete it.
        functions: names by words, of those functions of the script that offer words as well as files; may grow.
    """
    told = option.help.replace("%", "%%")
    if option.nargs == 0:
        parser.add_argument(*option.names, action="store_true", help=told)
        return
    value = option.names[-1].rpartition(".")[2].lstrip("-") if option.names else "value"
    action = parser.add_argument(*(option.names or (value,)), nargs=option.nargs, metavar=value.upper(), help=told)
    if not option.files:
        action.choices = option.words or None
    elif not option.words:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    else:
        name = functions.setdefault(" ".join(option.words), f"_safemerge_words_or_files_{len(functions)}")
        action.complete = {shell: f"({name})" if shell == "fish" else name}  # type: ignore[attr-defined]
