"""``study``: orders x methods x settings, from a configuration to tables and figures."""

import sys
from contextlib import nullcontext

from safemerge_pl.commands.parsers import HintingParser
from safemerge_pl.commands.remarks import silence_known_warnings
from safemerge_pl.study import Study

__all__ = ["make_parser", "run"]


def run() -> None:
    """Run the study that a configuration describes; an executor that it names is closed at the end."""
    silence_known_warnings()
    parser = make_parser()
    config = parser.instantiate(parser.parse_args(sys.argv[2:]))
    config.pop("config", None)
    study = Study(**{key: value for key, value in vars(config).items() if not key.startswith("_")})
    with study.executor or nullcontext():
        study.run()


def make_parser() -> HintingParser:
    """A parser of the options of this command."""
    parser = HintingParser(prog="safemerge study", description="Orders x methods x settings, to tables and figures.")
    parser.add_argument("--config", "-c", action="config")
    parser.add_class_arguments(Study)
    return parser
