"""A task's loader has to be asked for when the task begins."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from loops import EPOCHS, TASKS, Classifier, Tasks, batches, encoder, live
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from safemerge_pl.callbacks.reloading import is_fixed

Make = Callable[..., Any]
pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


def plain(task: int) -> DataLoader[Any]:
    """A loader without a will of its own."""
    return DataLoader(batches(task).dataset, 4)


class ByEpoch(Tasks):
    """Another task's loader, whenever it is asked."""

    def train_dataloader(self) -> Any:
        return plain(TASKS.index(self.task))


class InDict(Tasks):
    def train_dataloader(self) -> Any:
        return {"images": [plain(TASKS.index(self.task))]}


class OfModule(Classifier):
    """The module's own loader."""

    def train_dataloader(self) -> Any:
        return plain(self.current_epoch // EPOCHS)


class FromDict(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["images"][0], batch_idx)


class Switches(IterableDataset[Any]):
    """One set of data that is another task's after so many epochs."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[Any]:
        task, self.epochs = self.epochs // EPOCHS, self.epochs + 1
        return iter(batches(task).dataset)  # type: ignore[call-overload,no-any-return]


class Itself(Tasks):
    """One loader that switches by itself."""

    def train_dataloader(self) -> Any:
        return DataLoader(Switches(), 4)


@pytest.mark.parametrize(
    ("data", "module", "every", "message"),
    [
        (ByEpoch, Classifier, 0, "`train_dataloader` is asked once, and every later task .* set it to 1"),
        (InDict, FromDict, 0, "`train_dataloader` is asked once"),
        (None, OfModule, 0, "`train_dataloader` is asked once"),
        (ByEpoch, Classifier, 3, "is 3: loaders would change at other epochs than tasks"),
        (ByEpoch, Classifier, 4, "is 4: loaders would change at other epochs than tasks"),
    ],
)
def test_tasks_on_the_data_of_the_first_are_refused(
    data: Any, module: Any, every: int, message: str, make_trainer: Make
) -> None:
    trainer = make_trainer(live(), max_epochs=6, reload_dataloaders_every_n_epochs=every)
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(module(), *([] if data is None else [data()]))
    assert not trainer.global_step


@pytest.mark.parametrize("boundary", ["task", lambda trainer: True], ids=["name", "function"])
def test_other_boundaries_need_it_too(boundary: Any, make_trainer: Make) -> None:
    trainer = make_trainer(live(boundary=boundary), max_epochs=6, reload_dataloaders_every_n_epochs=0)
    with pytest.raises(MisconfigurationException, match="`train_dataloader` is asked once"):
        trainer.fit(Classifier(), ByEpoch())


@pytest.mark.parametrize("every", [3, 6])
def test_a_boundary_that_shows_late_between_two_loaders(every: int, make_trainer: Make) -> None:
    """Only at the boundary it is seen that the loader is still the old one; no step is made on it."""
    merge = live(boundary="task")
    trainer = make_trainer(merge, max_epochs=6, reload_dataloaders_every_n_epochs=every)
    with pytest.raises(MisconfigurationException, match=f"is {every}: .* still the loader of the task before"):
        trainer.fit(Classifier(), ByEpoch())
    assert (merge.tasks, trainer.global_step) == (["a"], 4)


def test_a_loader_that_switches_by_itself_goes_on_with_a_warning(make_trainer: Make) -> None:
    expected = Classifier()
    make_trainer(live(), max_epochs=6).fit(expected, ByEpoch())
    module = Classifier()
    trainer = make_trainer(live(), max_epochs=6, reload_dataloaders_every_n_epochs=0)
    with pytest.warns(UserWarning, match="unless the loader itself changes its data at each boundary"):
        trainer.fit(module, Itself())
    tiny.assert_same(encoder(module), encoder(expected))


def test_a_loader_that_was_given_is_asked_for_nothing(make_trainer: Make, recwarn: Any) -> None:
    module, merge = Classifier(), live()
    trainer = make_trainer(merge, max_epochs=6, reload_dataloaders_every_n_epochs=0)
    trainer.fit(module, DataLoader(Switches(), 4))
    assert len(merge.tasks) == 3
    assert not any("reload" in str(found.message) for found in recwarn)


@pytest.mark.parametrize("every", [0, 3])
def test_one_task_needs_one_loader(every: int, make_trainer: Make) -> None:
    for options in ({"boundary": "fit"}, {}, {"epochs_per_task": 2}):
        merge = live(**options)
        make_trainer(merge, max_epochs=2, reload_dataloaders_every_n_epochs=every).fit(Classifier(), ByEpoch())
        assert merge.tasks == ["task1"]


def test_loaders_that_change_with_the_tasks(make_trainer: Make, tmp_path: Path) -> None:
    """Every second epoch is enough; but Lightning counts anew after a resume, from the epoch before."""
    every, straight = make_trainer(live(), max_epochs=6), Classifier()
    every.fit(straight, ByEpoch())
    module = Classifier()
    make_trainer(live(), max_epochs=6, reload_dataloaders_every_n_epochs=2).fit(module, ByEpoch())
    tiny.assert_same(encoder(module), encoder(straight))
    half = make_trainer(live(), max_epochs=2)
    half.fit(Classifier(), ByEpoch())
    half.save_checkpoint(tmp_path / "x.ckpt")
    again = make_trainer(live(), max_epochs=6, reload_dataloaders_every_n_epochs=2)
    with pytest.raises(MisconfigurationException, match=r"after a resume .* on the data of the task before"):
        again.fit(Classifier(), ByEpoch(), ckpt_path=tmp_path / "x.ckpt")


class Told(Dataset[Any]):
    def set_epoch(self, epoch: int) -> None: ...

    def __len__(self) -> int:
        return 1


class Own(SequentialSampler): ...


class OwnLoader(DataLoader[Any]): ...


DATA = TensorDataset(torch.zeros(2))


@pytest.mark.parametrize(
    ("loader", "fixed"),
    [
        (DataLoader(DATA), True),
        (DataLoader(DATA, 2, shuffle=True), True),
        (DataLoader(DATA, batch_size=None), True),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, drop_last=False)), True),
        (DataLoader(DATA, sampler=Own(DATA)), False),
        (DataLoader(Told()), False),
        (DataLoader(Switches()), False),
        (OwnLoader(DATA), False),
        ([1, 2], False),
    ],
)
def test_who_may_switch_by_itself(loader: Any, fixed: bool) -> None:
    assert is_fixed(loader) is fixed
