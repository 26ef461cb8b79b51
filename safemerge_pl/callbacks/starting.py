"""The weights that training starts from, where a checkpoint is loaded over them."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from safemerge_pl.callbacks.part import MergePart
from safemerge_pl.scoring.weights import swapped_weights

__all__ = ["StartingWeights", "refuse_foreign"]


class StartingWeights:
    """Keeps what a part of a module held before a checkpoint was loaded over it.

    A resumed merge needs the weights that the module has of itself. Callbacks are set up before the module is, which
    may read its weights in ``setup`` or ``configure_model``, and have no hook between those and the loading. So the
    part is copied at the moment when the whole module's ``load_state_dict`` is called.

    Args:
        part: of the module.
    """

    def __init__(self, part: MergePart) -> None:
        self.part = part
        self._of: weakref.ref[nn.Module] | None = None  # the module that a checkpoint was loaded into
        self._kept: dict[str, Tensor] = {}
        self._hook: Any = None

    def watch(self, pl_module: L.LightningModule) -> None:
        """In ``setup``: keep what the module will hold if a checkpoint is loaded into it.

        What was kept of this module before stays: since then it holds the weights of a checkpoint.
        """
        self.stop()
        if not self.known(pl_module):
            self._of, self._kept = None, {}
            self._hook = pl_module.register_load_state_dict_pre_hook(self._keep)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Keep nothing more; what was read with no checkpoint is forgotten."""
        if self._of is None:
            self._kept = {}
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def loaded(self, pl_module: L.LightningModule) -> None:
        """A checkpoint was loaded, and not only a file that the module reads by itself."""
        if self._kept:
            self._of = weakref.ref(pl_module)
        self.stop()

    def known(self, pl_module: L.LightningModule) -> bool:
        """Whether it is kept what the module held before the checkpoint."""
        return self._of is not None and self._of() is pl_module

    def forget(self) -> None:
        """Free the memory: the merger has its own copy, or no checkpoint was loaded."""
        self.stop()
        self._of, self._kept = None, {}

    @contextmanager
    def in_place(self, pl_module: L.LightningModule) -> Iterator[None]:
        """The kept weights in the module for a while; nothing changes if none are kept."""
        kept = self._kept if self.known(pl_module) else {}
        with swapped_weights(self.part.target(pl_module), kept):
            yield

    def _keep(self, module: Any, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        if prefix:
            return
        try:
            target = self.part.target(module)
        except MisconfigurationException:  # the module is loading one of its own files, and is not complete yet
            return
        tensors = {name: tensor for name, tensor in target.state_dict().items() if isinstance(tensor, Tensor)}
        self._kept = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def refuse_foreign(trainer: L.Trainer, steps: int) -> None:
    """Refuse to go on from a checkpoint that tells nothing of a merge: its weights are trained ones.

    The step tells it, since callbacks that try learning rates load checkpoints, too, and end where they began.

    Args:
        trainer: about to train.
        steps: that it had made before a checkpoint was loaded.

    Raises:
        MisconfigurationException: telling how to pass the pretrained weights.
    """
    if trainer.global_step > steps:
        raise MisconfigurationException(
            f"the checkpoint {trainer.ckpt_path} was trained for {trainer.global_step} steps and holds no state of "
            "this callback: it was saved without it, or with another `module_attr`, so the pretrained weights are "
            "unknown; give those with `pretrained=`, or load them into the module and leave out `ckpt_path`."
        )
