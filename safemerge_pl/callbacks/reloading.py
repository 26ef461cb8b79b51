"""Whether the loop asks for another task's data when another task begins."""

from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["is_fixed", "require_new_loader", "require_reload"]


def require_reload(trainer: L.Trainer, epochs: int | None, begun: int, *, resumed: bool) -> None:
    """See that ``train_dataloader`` is asked again for each task, in a run of more than one.

    A loader that was given to ``fit`` itself cannot be asked again, so whoever gives one changes its data himself.

    Args:
        trainer: whose loaders are set up.
        epochs: of a task, ``None`` if only the run itself shows where tasks end.
        begun: epochs of the task in progress that are over.
        resumed: whether the run goes on from a checkpoint, where Lightning asks first with the epoch before.

    Raises:
        MisconfigurationException: if every later task would be trained on the first one's data.
    """
    every = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    if every == 1 or not trainer.fit_loop._data_source.is_module():
        return
    if every and epochs is None:
        return  # only a boundary itself shows whether it falls on a reload
    if every and epochs is not None and epochs % every == 0 and begun % every == 0 and not resumed:
        return
    given = f"`reload_dataloaders_every_n_epochs` is {every}"
    if not every:
        effect = "`train_dataloader` is asked once, and every later task would be trained on the data of the first"
    elif resumed:
        effect = "after a resume Lightning would train up to that many epochs on the data of the task before"
    else:
        effect = "loaders would change at other epochs than tasks, so tasks would be trained on each other's data"
    _refuse_or_warn(trainer, f"{given}: {effect}")


def require_new_loader(trainer: L.Trainer, before: Any) -> None:
    """At a boundary that could not be foreseen, see that the loader is not the one of the task before.

    Args:
        trainer: about to begin a task.
        before: ``trainer.train_dataloader`` of the task before.

    Raises:
        MisconfigurationException: if the task would be trained on the data of the one before.
    """
    every = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    if every > 1 and trainer.fit_loop._data_source.is_module() and trainer.train_dataloader is before:
        _refuse_or_warn(
            trainer,
            f"`reload_dataloaders_every_n_epochs` is {every}: a task begins, and this is still the loader of the task "
            "before",
        )


def _refuse_or_warn(trainer: L.Trainer, wrong: str) -> None:
    """Refuse loaders that give the same data for ever; warn of those that may change it themselves."""
    if all(is_fixed(loader) for loader in _each(trainer.train_dataloader)):
        raise MisconfigurationException(
            f"{wrong}; set it to 1. A loader whose data you change yourself can be given to `fit` directly."
        )
    rank_zero_warn(f"{wrong}, unless the loader itself changes its data at each boundary; if not, set it to 1.")


def is_fixed(loader: Any) -> bool:
    """Whether a loader is of PyTorch's own kind, which gives the same examples in every epoch.

    Iterable data sets, samplers and loaders of other classes, and data sets that are told the epoch may change them.

    Example:
        >>> is_fixed(DataLoader([1, 2])), is_fixed(iter([1, 2]))
        (True, False)
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return False
    own = (loader.sampler, loader.batch_sampler)
    plain = all(part is None or type(part).__module__.partition(".")[0] == "torch" for part in own)
    return plain and not hasattr(loader.dataset, "set_epoch")


def _each(loaders: Any) -> Iterator[Any]:
    """Loaders in whatever collection Lightning takes."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        for loader in loaders:
            yield from _each(loader)
    else:
        yield loaders
