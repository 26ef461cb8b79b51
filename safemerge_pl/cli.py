"""The command line: the table of verbs, and what they share. What a verb does is in ``commands/``."""

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from safemerge_pl.commands.wording import quote_refusal
from safemerge_pl.errors import SilentExit
from safemerge_pl.runtime.configs import append_repeated, packaged_configs, resolve_configs
from safemerge_pl.runtime.console import be_quiet, tolerate_names
from safemerge_pl.runtime.names import nearest
from safemerge_pl.runtime.own_modules import find_modules_beside
from safemerge_pl.runtime.stopping import Resumable, catch_stops
from safemerge_pl.version import __version__

__all__ = ["VERBS", "Verb", "main"]


class Verb(NamedTuple):
    """A verb of the command line.

    Args:
        runs: ``module:function``; the function has no parameters and reads ``sys.argv``.
        options: those that a first try needs, for the help.
        does: what it does, for the help.
        goes_on: what to do after it was stopped, unless the verb itself knows better.
    """

    runs: str
    options: str
    does: str
    goes_on: str = "repeat the command."


VERBS = {
    "fit": Verb(
        "safemerge_pl.commands.fit:run",
        "--config quickstart.yaml",
        "merge a stream of models and score it after each",
    ),
    "validate": Verb(
        "safemerge_pl.commands.fit:run",
        "--config quickstart.yaml --ckpt_path FILE",
        "score a checkpoint of a stream",
    ),
    "test": Verb(
        "safemerge_pl.commands.fit:run",
        "--config quickstart.yaml --ckpt_path FILE",
        "the same on the test loaders",
    ),
    "check": Verb(
        "safemerge_pl.commands.check:run",
        "--config quickstart.yaml",
        "list every problem of a configuration, in seconds",
    ),
    "fold": Verb(
        "safemerge_pl.commands.fold:run",
        "--pretrained P --incoming T --output O",
        "fold one more model, into an earlier merge with --merged",
        "the output is as it was, or whole; repeat the command.",
    ),
    "study": Verb(
        "safemerge_pl.commands.study:run",
        "--config study_methods.yaml",
        "orders x methods x settings, to tables and figures",
        "what is done is kept; repeat the command to go on.",
    ),
    "info": Verb(
        "safemerge_pl.commands.info:run", "FOLDER", "what was merged in a folder, and whether it still matches"
    ),
    "config": Verb("safemerge_pl.commands.config:run", "NAME > mine.yaml", "print a configuration that comes along"),
    "completion": Verb(
        "safemerge_pl.commands.completion:run",
        "bash > FILE",
        "print the script by which Tab completes all this in bash, zsh and fish",
    ),
}
"""Modules are imported when their verb is called, so that help does not wait for heavy libraries."""

_HELP = """usage: safemerge VERB [options]

Fold fine-tuned models, one after another, into one merged model, without any task data.

{verbs}

Options of a verb: safemerge VERB --help. A value of the configuration is changed by its path, for example
--merge.keep_ratio 0.3 or --data.order_seed 42. A run that was stopped after a task goes on with --ckpt_path last.
-q tells problems only. Exit codes: 0 done, 1 a problem that is named, 2 a wrong command line, 130 and 143 stopped.
Configurations that come along: {configs}.
"""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point; exits with 1 and one clear message for anything the user can mend, with 128 + signal if stopped."""
    tolerate_names()
    given = list(sys.argv[1:] if args is None else args)
    argv = [argument for argument in given if argument not in ("-q", "--quiet")]
    if not argv or argv[0] in ("-h", "--help"):
        print(_help(), end="")
        return
    if argv[0] == "--version":
        print(__version__)
        return
    if argv[0] not in VERBS:
        meant = nearest(argv[0], VERBS)
        hint = "use one of" if meant is None else f"did you mean '{meant}'? The verbs are"
        _fail(f"there is no verb '{argv[0]}'; {hint} {', '.join(VERBS)}, or --help.", code=2)
    # threads that spin while they wait make a run a hundred times slower as soon as another program uses a core
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if "RANK" in os.environ:  # what a process says when another one ends is enough, without stacks of C++
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    goes_on = VERBS[argv[0]].goes_on
    with catch_stops() as stop, be_quiet() if len(argv) < len(given) else contextlib.nullcontext():
        try:
            _run(argv)
        except SilentExit:
            raise
        except BaseException as error:  # Lightning makes an exit of an interrupt
            if stop.number is None and not isinstance(error, KeyboardInterrupt):
                raise
            goes_on = str(error) if isinstance(error, Resumable) else goes_on
    if stop.number is not None:
        if os.environ.get("RANK", "0") == "0":
            print(f"\nsafemerge: stopped by {stop.name}; {goes_on}", file=sys.stderr)
        raise SystemExit(128 + stop.number)


def _run(argv: list[str]) -> None:
    """Do what a verb does."""
    module, _, function = VERBS[argv[0]].runs.partition(":")
    try:
        # what verbs read, also in the processes that DDP starts
        sys.argv = [sys.argv[0], *append_repeated(resolve_configs(argv))]
        find_modules_beside(sys.argv)
        getattr(importlib.import_module(module), function)()
    except BrokenPipeError:  # somebody has read enough of what is printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(141) from None
    except Exception as error:
        if os.environ.get("SAFEMERGE_TRACEBACK") or not _is_for_the_user(error):
            raise
        _fail(quote_refusal(str(error)))


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = [f"  safemerge {name:<{width}} {verb.options}   {verb.does}" for name, verb in VERBS.items()]
    return _HELP.format(verbs="\n".join(verbs), configs=", ".join(packaged_configs()))


def _is_for_the_user(error: Exception) -> bool:
    """Errors that say what to mend; anything else is a bug and keeps its traceback."""
    if isinstance(error, (ValueError, FileNotFoundError, PermissionError)):
        return True  # without the seconds that it takes to import Lightning
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    return isinstance(error, MisconfigurationException)


def _fail(message: str, code: int = 1) -> NoReturn:
    print(f"safemerge: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
