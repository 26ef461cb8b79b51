"""Write configurations that can be read again, also where the default of a setting is an object."""

from typing import Any

import torch
import yaml
from jsonargparse import set_dumper
from jsonargparse.typing import register_type

__all__ = ["write_plain_values"]


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """PyYAML's own, which writes an entry of an enumeration of strings as the string that it is."""


# `interval: str = Interval.step` of Lightning's Timer: left to itself PyYAML "cannot represent an object" there
_Dumper.add_multi_representer(str, lambda dumper, value: dumper.represent_str(str.__str__(value)))


def write_plain_values() -> None:
    """Let jsonargparse write what callbacks of Lightning have for defaults as text that it can read.

    Without this a ``Timer`` stops a run as soon as its configuration is written, and the device of a
    ``StochasticWeightAveraging`` comes back as another one.

    Example:
        >>> import jsonargparse, lightning as L
        >>> write_plain_values()
        >>> parser = jsonargparse.ArgumentParser()
        >>> parser.add_class_arguments(L.pytorch.callbacks.Timer)  # doctest: +ELLIPSIS
        [...]
        >>> print(parser.dump(parser.get_defaults()), end="")
        interval: step
        verbose: true
    """
    set_dumper("yaml", _dump)
    register_type(torch.device, deserializer_exceptions=(RuntimeError, TypeError), fail_already_registered=False)


def _dump(content: Any) -> str:
    """As jsonargparse does, with the dumper above."""
    text: str = yaml.dump(content, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text
