"""The part of a module that is merged, and how."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from safemerge_pl.checkpoints.differences import Mismatch
from safemerge_pl.folding.bound import MaxResponse, choose_bound, require_drift_bound
from safemerge_pl.methods import MergeMethod

__all__ = ["MergePart", "require_started"]

Merger = TypeVar("Merger")


@dataclass(frozen=True)
class MergePart:
    """What :class:`MergeCallback` merges, whether the models come from files or from training.

    Args:
        method: how to merge.
        layers: shell-style patterns of the parameters to merge, instead of the built-in choice.
        module_attr: dotted path of the sub-module that is merged; by default the tower that the module's backbone
            names, or the whole module.
        device: where the arithmetic runs, ``"auto"`` for the module's device.
        on_mismatch: what to do with a model of another image size or vocabulary.
        max_response: bound on the response of what is merged, ``"auto"`` for the method's own, ``None`` for none.
        max_drift: bound on the drift of features of noise; ``None`` for none.

    Example:
        >>> from safemerge_pl.methods import SafeMerge
        >>> module = L.LightningModule()
        >>> module.encoder = nn.Linear(2, 3)
        >>> MergePart(SafeMerge(), module_attr="encoder").target(module)
        Linear(in_features=2, out_features=3, bias=True)
    """

    method: MergeMethod
    layers: str | Sequence[str] | None = None
    module_attr: str | None = None
    device: str = "auto"
    on_mismatch: Mismatch = "error"
    max_response: MaxResponse = "auto"
    max_drift: float | None = None

    def __post_init__(self) -> None:
        choose_bound(self.method, self.max_response)  # a bad one is refused now, not at the start of `fit`
        require_drift_bound(self.max_drift)

    def target(self, module: L.LightningModule) -> nn.Module:
        """The sub-module that is merged.

        Raises:
            MisconfigurationException: if ``module_attr`` leads nowhere, or to something else than a module.
        """
        path = self.module_attr
        if path is None:
            backbone = getattr(module, "backbone", None)
            name = getattr(backbone, "merged_attr", None)
            path = f"backbone.{name}" if name else ""
        try:
            target = operator.attrgetter(path)(module) if path else module
        except AttributeError as error:
            raise MisconfigurationException(
                f"`module_attr` '{path}' does not exist in {type(module).__name__}: {error}."
            ) from error
        if not isinstance(target, nn.Module):
            raise MisconfigurationException(f"`module_attr` '{path}' is a {type(target).__name__}, not a module.")
        return target

    def choose_device(self, module: L.LightningModule) -> torch.device:
        """Where the arithmetic runs for a module that lies where it lies now."""
        return torch.device(module.device if self.device == "auto" else self.device)


def require_started(merger: Merger | None) -> Merger:
    """The merger, once ``setup`` has made it.

    Raises:
        RuntimeError: before that.
    """
    if merger is None:
        raise RuntimeError("the merge has not started: `setup` was not called for stage 'fit'.")
    return merger
