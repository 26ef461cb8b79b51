"""The machine and the versions that a result was made with."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from safemerge_pl.version import __version__

__all__ = ["environment", "machine_key"]

_PACKAGES = ("safemerge_pl", "torch", "lightning", "torchmetrics", "transformers", "datasets")


def environment() -> dict[str, str]:
    """Versions and machine, for whoever wants to repeat a run.

    Example:
        >>> sorted(environment())[:4]
        ['cpus', 'datasets', 'lightning', 'platform']
    """
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["cpus"] = str(os.cpu_count())
    return found


def machine_key(device: torch.device) -> list[str]:
    """Part of a cache key: what the bits of a result may depend on besides its inputs.

    Args:
        device: where the result is worked out.

    Returns:
        The kind of processor, torch's version and this package's.

    Example:
        >>> machine_key(torch.device("cpu"))[1] == torch.__version__
        True
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return [kind, torch.__version__, __version__]
