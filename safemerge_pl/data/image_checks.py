"""Compare the rows of an image set with its description, before anything is scored."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safemerge_pl.data.image_sets import SetSpec

__all__ = ["NAMES_FILE", "check_rows", "is_like"]

NAMES_FILE = "classnames.txt"
"""Class names beside a web data set, whose labels are bare numbers."""

_IMAGE_COLUMNS = ("image", "img", "jpg", "png", "webp", "jpeg")
_LABEL_COLUMNS = ("label", "labels", "cls", "fine_label")


def check_rows(rows: Any, spec: SetSpec, files: Sequence[Path], any_size: bool) -> Any:
    """Check everything that could make a score wrong, and give the two columns their usual names."""
    import datasets

    where = f"set '{spec.name}' in {files[0].parent}"
    columns = {}
    for kind, wanted, others in (("image", spec.image, _IMAGE_COLUMNS), ("label", spec.label, _LABEL_COLUMNS)):
        present = [name for name in (wanted, *others) if name in rows.column_names]
        if not present:
            raise ValueError(f"{where} has no column `{wanted}` for the {kind}; it has {', '.join(rows.column_names)}.")
        columns[kind] = present[0]
    rows = rows.select_columns(list(columns.values()))
    if columns["image"] != "image" or columns["label"] != "label":
        rows = rows.rename_columns({column: kind for kind, column in columns.items() if kind != column})
    if not isinstance(rows.features["image"], datasets.Image):
        try:
            rows = rows.cast_column("image", datasets.Image())
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"{where}: column `{columns['image']}` holds {rows.features['image']}, no images."
            ) from error
    _require_labels(rows, spec, where)
    _require_listed_names(files[0], spec, where)
    if spec.size is not None and len(rows) != spec.size and not any_size:
        raise ValueError(
            f"{where} has {len(rows)} images, expected {spec.size} in the split '{spec.split}'; fetch it again, or set "
            "the data's `any_size` if it is meant to differ."
        )
    return rows


def _require_labels(rows: Any, spec: SetSpec, where: str) -> None:
    """Labels must be the indices of the described classes, in the described order."""
    import datasets

    feature, count = rows.features["label"], len(spec.classes)
    if isinstance(feature, datasets.ClassLabel):
        if feature.num_classes != count:
            raise ValueError(f"{where} has {feature.num_classes} classes, expected {count}: it is another data set.")
        mine = [_plain(name) for name in spec.classes]
        for index, name in enumerate(map(_plain, feature.names)):
            if name in mine and mine[index] != name:
                raise ValueError(
                    f"{where} has its classes in another order: label {index} is '{feature.names[index]}', expected "
                    f"'{spec.classes[index]}'; sort them as {spec.name}.yaml does."
                )
    dtype = getattr(feature, "dtype", str(feature))
    if not re.fullmatch(r"bool|u?int\d+", str(dtype)):
        raise ValueError(f"{where} has labels of type {dtype}, expected class indices from 0 to {count - 1}.")
    if not len(rows):
        raise ValueError(f"{where} is empty.")
    labels = rows.select_columns("label").with_format("numpy")[:]["label"].astype("int64")
    if labels.min() < 0 or labels.max() >= count:
        wrong = int(labels.min() if labels.min() < 0 else labels.max())
        raise ValueError(f"{where} has the label {wrong}, expected 0 to {count - 1}: a split without public labels?")


def _require_listed_names(file: Path, spec: SetSpec, where: str) -> None:
    """Class names in a list beside the archives must stand where the description has them.

    Such lists word some classes in other ways, so a few names out of place prove nothing; most of them do.
    """
    found = [place / NAMES_FILE for place in (file.parent, file.parent.parent) if (place / NAMES_FILE).is_file()]
    if not found:
        return
    theirs = [_plain(line) for line in found[0].read_text(encoding="utf-8").splitlines() if line.strip()]
    mine = [_plain(name) for name in spec.classes]
    shared = [name for name in theirs if name in mine]
    placed = sum(a == b for a, b in zip(mine, theirs, strict=False))
    if len(theirs) != len(mine) or placed < 0.9 * len(shared):
        raise ValueError(
            f"{where}: {found[0].name} lists {len(theirs)} classes, {placed} of {len(mine)} where {spec.name}.yaml has "
            "them: it is another data set, or its labels are in another order."
        )


def is_like(name: str, other: str) -> bool:
    """Whether two names of a class share a word, or nearly are the same.

    Example:
        >>> is_like("annual_crop", "annual crop land"), is_like("AnnualCrop", "annual crop"), is_like("0", "river")
        (True, True, False)
    """
    one, two = _plain(name), _plain(other)
    return bool({*one.split()} & {*two.split()}) or difflib.SequenceMatcher(None, one, two).ratio() > 0.6


def _plain(name: str) -> str:
    """A class name without case, underscores and marks, for comparing."""
    return re.sub(r"[\W_]+", " ", name.casefold()).strip()
