"""The embedded zoo: its index agrees with its files, and a wrong name gets help."""

import json
from pathlib import Path

import pytest

from safemerge_pl.architectures.layers import select_layers
from safemerge_pl.checkpoints import match_names, open_checkpoint
from safemerge_pl.zoo import FILES, Zoo


def test_every_task_has_an_expert_that_fits_the_model_and_its_data() -> None:
    zoo = Zoo()
    base = open_checkpoint(zoo.model)
    layers = select_layers(base.shapes())
    assert len(layers) == 6 * 5
    for task in zoo.tasks():
        expert = open_checkpoint(zoo.expert(task))
        names = match_names([layer.parameter for layer in layers], expert)
        assert all(expert.shape(theirs) == base.shape(mine) for mine, theirs in names.items())
        assert zoo.data(task).stat().st_size > 1000


def test_every_set_has_as_many_labels_as_classes() -> None:
    import pyarrow.parquet as pq

    zoo = Zoo()
    for name in [*zoo.tasks(), *zoo.controls]:
        labels = pq.read_table(zoo.data(name), columns=["label"])["label"].to_pylist()
        classes = zoo.describe(name)["classes"]
        assert len(set(classes)) == len(classes)
        assert 0 <= min(labels) <= max(labels) < len(classes), name


def test_streams_are_distinct_tasks_of_the_index() -> None:
    zoo = Zoo()
    for length in map(int, zoo.index["streams"]):
        tasks = zoo.tasks(length)
        assert len(tasks) == len(set(tasks)) == length
        assert not set(tasks) & set(zoo.controls)
        assert all(zoo.describe(task) for task in tasks)
    assert zoo.tasks() == zoo.tasks(8)


def test_a_list_of_tasks_is_a_copy() -> None:
    zoo = Zoo()
    zoo.tasks().append("x")
    zoo.controls.append("x")
    assert "x" not in [*zoo.tasks(), *zoo.controls]


@pytest.mark.parametrize("length", [7, 14, 0])
def test_a_length_that_the_zoo_lacks_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"has streams of 8 tasks, not {length}"):
        Zoo().tasks(length)


@pytest.mark.parametrize(
    ("wrong", "right"), [("minst", "mnist"), ("Fashion", "fashion"), ("probe1_seen_style", "probe1_seen_styles")]
)
def test_a_misspelt_task_gets_a_suggestion(wrong: str, right: str) -> None:
    zoo = Zoo()
    for find in (zoo.describe, zoo.expert, zoo.data):
        with pytest.raises(ValueError, match=rf"no set '{wrong}'; did you mean '{right}'\?"):
            find(wrong)


def test_a_foreign_task_gets_the_whole_list() -> None:
    with pytest.raises(ValueError, match=r"no set 'xqzzy'; it has mnist, .*weather"):
        Zoo().describe("xqzzy")


def test_a_probe_has_no_expert() -> None:
    with pytest.raises(ValueError, match=r"the zoo lacks .*experts.probe1_seen_styles"):
        Zoo().expert("probe1_seen_styles")


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_an_extra_folder_without_index_is_refused(kind: str, tmp_path: Path) -> None:
    extra = tmp_path / "extra"
    if kind == "empty":
        extra.mkdir()
    with pytest.raises(ValueError, match=r"`extra_zoo` .*extra holds no zoo\.json"):
        Zoo(extra).tasks()


@pytest.fixture
def extra(tmp_path: Path) -> Path:
    """A folder that adds one task to the embedded ones, its expert present, its data missing."""
    index = json.loads((FILES / "zoo.json").read_text())
    index["sets"]["cars"] = index["sets"]["mnist"]
    index["streams"]["9"] = [*index["streams"]["8"], "cars"]
    (tmp_path / "zoo.json").write_text(json.dumps(index))
    (tmp_path / "experts" / "cars").mkdir(parents=True)
    return tmp_path


def test_an_extra_folder_adds_to_the_embedded_zoo(extra: Path) -> None:
    zoo = Zoo(extra)
    assert zoo.tasks()[-1] == "cars"
    assert len(zoo.tasks(8)) == 8
    assert zoo.expert("cars") == extra / "experts" / "cars"
    assert zoo.expert("mnist") == FILES / "experts" / "mnist"
    assert zoo.model == FILES / "model"


def test_a_file_missing_in_the_extra_folder_is_named(extra: Path) -> None:
    with pytest.raises(ValueError, match="the zoo lacks") as caught:
        Zoo(extra).data("cars")
    assert str(extra / "data" / "cars.parquet") in str(caught.value)
