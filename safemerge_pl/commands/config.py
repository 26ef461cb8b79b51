"""``config``: print a configuration that comes along, to be changed and given to ``--config``."""

import sys

from safemerge_pl.runtime.configs import config_folder, packaged_configs
from safemerge_pl.runtime.names import did_you_mean

__all__ = ["run"]


def run() -> None:
    """Print the configuration of a name; without one, list them all with what they do."""
    names = [argument for argument in sys.argv[2:] if not argument.startswith("-")]
    if not names:
        for name in packaged_configs():
            first = (config_folder() / name).read_text(encoding="utf-8").splitlines()[0]
            print(f"{name:<26} {first.lstrip('# ')}")
        return
    name = names[0] if names[0].endswith(".yaml") else f"{names[0]}.yaml"
    if name not in packaged_configs():
        raise ValueError(f"no configuration {names[0]} comes along; {did_you_mean(name, packaged_configs())}")
    print((config_folder() / name).read_text(encoding="utf-8"), end="")
