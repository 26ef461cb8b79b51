"""What is not as its description says is refused with the remedy."""

from pathlib import Path
from typing import Any

import datasets
import pytest
from tiny_hub import rows_of, write_set

from safemerge_pl.data.image_sets import find_spec

pytestmark = pytest.mark.usefixtures("own_cache")


def test_class_names_beside_archives(tmp_path: Path) -> None:
    """Labels of a web data set are bare numbers; its list of names tells another order."""
    write_set(tmp_path / "fer2013", "fer2013")
    names = list(find_spec("fer2013").classes)
    listed = tmp_path / "fer2013" / "classnames.txt"
    listed.write_text("\n".join(["furious", *names[1:]]) + "\n")
    assert len(rows_of(tmp_path, "fer2013")) == 5
    for wrong in (names[::-1], names[1:], [*names, "bored"]):
        listed.write_text("\n".join(wrong))
        with pytest.raises(ValueError, match=r"classnames\.txt lists \d classes, \d of 7 where fer2013\.yaml has them"):
            rows_of(tmp_path, "fer2013")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": [f"c{i}" for i in range(9)], "labels": [0]}, "has 9 classes, expected 10: it is another data set"),
        (
            {"names": ["forest", "annual crop land", *map(str, range(8))]},
            "label 0 is 'forest', expected 'annual crop land'; sort them as eurosat.yaml",
        ),
        ({"label": "klass"}, "has no column `label` for the label; it has image, klass"),
        ({"image": "picture"}, "has no column `image` for the image"),
        ({"feature": datasets.Value("string"), "labels": ["a", "b"]}, "labels of type string, expected class indices"),
        ({"feature": datasets.Value("int32"), "labels": [0, 10]}, "has the label 10, expected 0 to 9"),
        ({"feature": datasets.Value("int32"), "labels": [-1, -1]}, "label -1, expected 0 to 9: a split without public"),
        ({"labels": []}, "no data"),
        ({"file": "train-00000-of-00001.parquet"}, "has no split 'test', that is test-.*; it has data/train-00000"),
        ({"file": "test-00000-of-00003.parquet"}, r"shards 1, 2 of 3 are missing beside data/test-00000"),
    ],
)
def test_another_set_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_set(tmp_path / "eurosat", "eurosat", **changes)
    with pytest.raises(ValueError, match=message) as caught:
        rows_of(tmp_path)
    assert "set 'eurosat'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_column_that_holds_no_images(tmp_path: Path) -> None:
    place = tmp_path / "mnist" / "data"
    place.mkdir(parents=True)
    datasets.Dataset.from_dict({"image": [1.5], "label": [0]}).to_parquet(place / "test-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=r"column `image` holds .*float.*, no images"):
        rows_of(tmp_path, "mnist")
