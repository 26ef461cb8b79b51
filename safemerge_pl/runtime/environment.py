"""What results depend on beside their inputs: versions and the machine."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from safemerge_pl.version import __version__

__all__ = ["describe_environment", "machine_key"]


def describe_environment() -> dict[str, str]:
    """Versions and machine, for whoever wants to repeat the run."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("safemerge_pl", "torch", "lightning", "torchmetrics", "transformers", "datasets"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["cpus"] = str(os.cpu_count())
    return found


def machine_key(device: torch.device) -> list[str]:
    """What the bits of a result may depend on beside its inputs."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return [kind, torch.__version__, __version__]
