"""Stream data modules in general: shares of processes, names, what a kind of data must say."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment
from small import SmallZoo
from tiny_hub import data_of

from safemerge_pl import data
from safemerge_pl.data import ImageSet, StreamDataModule, ZooData
from safemerge_pl.data.module import ExactShard

pytestmark = pytest.mark.usefixtures("datasets_apart")


@pytest.mark.parametrize(("length", "world"), [(5, 2), (1, 2), (7, 3), (6, 3), (0, 2)])
def test_shards_hold_each_sample_once(length: int, world: int) -> None:
    """Nothing is padded, so nothing counts twice."""
    shards = [list(ExactShard(length, rank, world)) for rank in range(world)]
    assert sorted(index for shard in shards for index in shard) == list(range(length))
    assert [len(ExactShard(length, rank, world)) for rank in range(world)] == [len(shard) for shard in shards]


def test_two_sets_of_one_name_and_small_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="`controls` must be distinct and no tasks"):
        ZooData(tasks=["mnist"], controls=["mnist"])
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        ZooData(batch_size=0)
    with pytest.raises(ValueError, match=r"streams of 8 tasks, not 14"):
        ZooData(tasks=14)


def test_all_missing_sets_are_named_at_once(benchmark: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=r"set 'dtd'.*does not exist") as caught:
        data_of(benchmark, tasks=["mnist", "dtd", "kmnist"]).setup("fit")
    assert [line.split("'")[1] for line in str(caught.value).splitlines()] == ["dtd", "kmnist"]


def test_a_kind_of_data_must_say_where_its_sets_come_from() -> None:
    with pytest.raises(TypeError, match=r"abstract method '?load_set"):
        StreamDataModule(["a"])  # type: ignore[abstract]


def test_a_set_is_opened_once() -> None:
    opened = []

    class Counts(SmallZoo):
        def load_set(self, name: str) -> ImageSet:
            opened.append(name)
            return super().load_set(name)

    data = Counts(["mnist"], [])
    assert data.labelled_set("mnist") is data.labelled_set("mnist")
    data.setup("fit")
    assert opened == ["mnist"]


def kinds_in_files() -> list[type[StreamDataModule]]:
    """Classes by their own type: for ``isinstance`` of Python 3.10 ``dict[str, int]`` is a class as well."""
    modules = [importlib.import_module(f"safemerge_pl.data.{f.name}") for f in pkgutil.iter_modules(data.__path__)]
    found = {each for module in modules for each in vars(module).values() if issubclass(type(each), type)}
    return sorted((kind for kind in found if issubclass(kind, StreamDataModule)), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", kinds_in_files())
def test_the_package_lists_every_kind_of_data(kind: type[StreamDataModule]) -> None:
    assert getattr(data, kind.__name__) is kind
    assert kind.__name__ in data.__all__


def test_a_listed_kind_needs_no_path_in_a_configuration() -> None:
    """In a fresh process, with nothing imported but what the command line imports."""
    code = "from safemerge_pl.cli import main; main(['fit', '--data', 'GLUEData', '--print_config'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert "class_path: safemerge_pl.data.GLUEData" in run.stdout, run.stderr


def test_data_know_nothing_of_scoring() -> None:
    code = "import sys, safemerge_pl.data; print([n for n in sys.modules if n.startswith('safemerge_pl.scoring')])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment())
    assert run.stdout.strip() == "[]"
