"""Your own images in folders: wording and order cannot part, and what is not there is named."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.data import ImageFolderData, ZooData


def paint(folder: Path, *names: str) -> None:
    for place, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (place * 9 % 256, 0, 0)).save(folder / name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Pets with a split, fruit without, and a control set whose folders are numbers."""
    paint(tmp_path / "pets", "train/cat/a.png", "test/tabby_cat/b.png", "test/dog/c.JPG", "test/dog/more/d.png")
    paint(tmp_path / "fruit", "pear/1.png", "apple/1.png", "apple/2.webp")
    paint(tmp_path / "digits", "test/10/a.png", "test/9/a.png")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    return tmp_path


def test_folders_are_tasks_and_classes(root: Path) -> None:
    data = ImageFolderData(str(root), controls="digits", classes={"pets/dog": "small dog", "9": "nine", "10": "ten"})
    assert data.stream.names == ("fruit", "pets")
    pets, fruit, digits = (data.load_set(name) for name in ("pets", "fruit", "digits"))
    assert (pets.classes, pets.templates) == (("small dog", "tabby cat"), ("a photo of a {}.",))
    assert pets.rows["label"] == [0, 0, 1]
    assert fruit.classes == ("apple", "pear")
    assert len(fruit) == 3
    assert fruit.rows[0]["image"].size == (8, 8)
    assert digits.classes == ("ten", "nine"), "in the order of the folders, whatever that is"
    assert digits.rows["label"] == [0, 1]
    assert data.settings()["classes"]["digits"] == ["ten", "nine"]


def test_tasks_templates_and_limit(root: Path) -> None:
    templates: Any = {"fruit": ["a drawing of {}"]}
    data = ImageFolderData(str(root), tasks=["pets", "fruit"], templates=templates, limit=2)
    assert data.stream.names == ("pets", "fruit")
    assert data.load_set("fruit").templates == ("a drawing of {}",)
    assert data.load_set("pets").templates == ("a photo of a {}.",)
    assert data.load_set("fruit").rows["label"] == [0, 0]
    assert data.load_set("pets").rows["label"] == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root": "gone"}, r"the root of the images: .*gone is no folder"),
        ({"root": "empty"}, r"holds no folders; expected <task>/<class>/<image>"),
        ({"tasks": ["pet"]}, "has no folder 'pet'; did you mean 'pets'"),
        ({"classes": {"dogs": "dog"}}, "`classes` words 'dogs', and no task has such a folder; did you mean 'dog'"),
        ({"classes": {"fruit/dog": "dog"}}, "`classes` words 'fruit/dog'"),
        ({"split": "valid"}, "has no folder 'valid' but test, train; set the data's `split`"),
        ({"templates": {"fruits": "single"}}, "`templates` names 'fruits', no task or control set"),
        ({"templates": "a photo"}, "there are no templates 'a photo'"),
        ({"limit": 0}, "`limit` must be at least 1"),
    ],
)
def test_what_is_not_there_is_named(options: dict[str, Any], message: str, root: Path) -> None:
    (root / "empty").mkdir()
    place = str(root / options.pop("root", ""))
    options.setdefault("tasks", ["fruit", "pets"])
    with pytest.raises(ValueError, match=message):
        ImageFolderData(place, **options)


def test_folders_without_images(tmp_path: Path) -> None:
    (tmp_path / "task" / "cat").mkdir(parents=True)
    data = ImageFolderData(str(tmp_path))
    with pytest.raises(ValueError, match=r"set 'task': .* has no images in its folders \(.png"):
        data.setup("fit")


def test_scores_are_those_of_the_same_images_in_a_set(tmp_path: Path) -> None:
    """The order of classes differs between both; the answers may not."""
    backbone, zoo = CLIPBackbone("zoo"), ZooData(tasks="weather")
    backbone.load()
    known = zoo.load_set("weather")
    words = {}
    for place in range(60):
        row = known.rows[place]
        folder = tmp_path / "weather" / f"{99 - row['label']}"
        folder.mkdir(parents=True, exist_ok=True)
        row["image"].convert("RGB").save(folder / f"{place:02}.png")
        words[folder.name] = known.classes[row["label"]]
    data = ImageFolderData(str(tmp_path), classes=words, templates=list(known.templates))
    mine = data.load_set("weather")
    kept = [label for label, name in enumerate(known.classes) if name in mine.classes]
    assert sorted(mine.classes) == sorted(known.classes[label] for label in kept)
    answers = []
    for images, places in ((known, range(60)), (mine, range(len(mine)))):
        pixels, labels = images.batches(backbone).__getitems__(list(places))
        found = images.score(backbone)(pixels)
        chosen = found[:, kept] if images is known else found
        names = [known.classes[label] for label in kept] if images is known else mine.classes
        answers.append(sorted((images.classes[b], names[a]) for a, b in zip(chosen.argmax(1), labels, strict=True)))
    assert answers[0] == answers[1]
    assert any(right == said for right, said in answers[0])
