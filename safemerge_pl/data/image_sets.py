"""Image sets described in data files: where the images are, what the classes are called, how they are asked for.

Twenty tasks and three held-out sets come along in ``sets/``, one YAML file each; a folder of such files adds others.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safemerge_pl.runtime.files import local_path
from safemerge_pl.runtime.names import name_list

__all__ = ["CONTROLS", "TASKS", "SetSpec", "find_spec", "find_templates", "stream_of"]

TASKS = (
    *("sun397", "stanford-cars", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd"),
    *("oxford_flowers102", "pcam", "fer2013", "oxford-iiit-pet", "stl10", "cifar100"),
    *("cifar10", "food101", "fashion_mnist", "emnist_letters", "kmnist", "rendered-sst2"),
)
"""The paper's tasks in its order; its streams are the first 8, 14 and 20."""

CONTROLS = ("imagenet", "imagenet-r", "objectnet")
"""The held-out sets of the paper."""

FOLDER = Path(__file__).parent / "sets"


@dataclass(frozen=True)
class SetSpec:
    """What a file of ``sets/`` says.

    Attributes:
        name: the file's name without suffix.
        hub: id of the data set on the hub.
        split: of the images to score.
        classes: names in label order.
        templates: sentences with ``{}`` for the class name.
        config: configuration on the hub, where it has several.
        image, label: names of the columns.
        size: images in the split; ``None`` if unknown.
        counts: backbone -> ``pretrained`` and ``expert`` -> right answers.
    """

    name: str
    hub: str
    split: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    config: str | None = None
    image: str = "image"
    label: str = "label"
    size: int | None = None
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "SetSpec":
        """Read a file.

        Raises:
            ValueError: if it is no description of a set, naming the file and what is wrong.
        """
        import yaml

        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is no YAML file: {' '.join(str(error).split())}") from error
        fields = {entry.name: entry for entry in dataclasses.fields(cls) if entry.name != "name"}
        if not isinstance(content, dict):
            raise ValueError(f"{path} describes no image set: expected {', '.join(fields)}.")
        unknown = [str(key) for key in content if key not in fields]
        missing = [key for key in ("hub", "split", "classes", "templates") if not content.get(key)]
        if unknown or missing:
            parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has an unknown {', '.join(unknown)}"] * bool(
                unknown
            )
            raise ValueError(f"{path} {' and '.join(parts)}; a set has {', '.join(fields)}.")
        names = _classes(content.pop("classes"), path)
        return cls(path.stem, classes=names, templates=find_templates(content.pop("templates"), str(path)), **content)

    def count(self, backbone: str, kind: str) -> int | None:
        """Right answers known for a backbone by its name or path, ``pretrained`` or ``expert``.

        Example:
            >>> find_spec("mnist").count("openai/clip-vit-base-patch32", "expert")
            9958
        """
        found = self.counts.get(Path(backbone).name)
        return None if found is None else found.get(kind)


def find_spec(name: str, folder: str | Path | None = None) -> SetSpec:
    """The description of a set, from a folder of the user's or from those that come along.

    Raises:
        ValueError: if there is none of this name.

    Example:
        >>> find_spec("eurosat").classes[-1], len(find_spec("imagenet-r").classes)
        ('lake or sea', 200)
    """
    places = [FOLDER] if folder is None else [local_path(folder), FOLDER]
    for place in places:
        if (place / f"{name}.yaml").is_file():
            return SetSpec.read(place / f"{name}.yaml")
    known = sorted(path.stem for place in places for path in place.glob("*.yaml"))
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(known)}."
    raise ValueError(f"there is no image set '{name}'; {hint}")


def stream_of(tasks: str | Sequence[str] | int) -> list[str]:
    """Names of the paper's stream of 8, 14 or 20 tasks, or the names given.

    Example:
        >>> stream_of(8)[0], len(stream_of(14)), stream_of(["dtd"])
        ('sun397', 14, ['dtd'])
    """
    if not isinstance(tasks, int):
        return name_list(tasks, "tasks")
    if tasks not in (8, 14, 20):
        raise ValueError(f"the paper's streams have 8, 14 and 20 tasks, not {tasks}; name the tasks instead.")
    return list(TASKS[:tasks])


def find_templates(templates: Any, place: str) -> tuple[str, ...]:
    """Templates as given, or open_clip's by name: ``openai`` for the 80, ``simple`` for the 7, ``single`` for one.

    Example:
        >>> len(find_templates("openai", "here")), find_templates("single", "here")
        (80, ('a photo of a {}.',))
    """
    if templates == "single":
        return ("a photo of a {}.",)
    if isinstance(templates, str):
        import open_clip

        known = {"openai": open_clip.OPENAI_IMAGENET_TEMPLATES, "simple": open_clip.SIMPLE_IMAGENET_TEMPLATES}
        if templates not in known:
            raise ValueError(f"{place}: there are no templates '{templates}'; use openai, simple, single, or a list.")
        return tuple(template("{}") for template in known[templates])
    if not isinstance(templates, (list, tuple)) or not templates or not all("{}" in str(each) for each in templates):
        raise ValueError(f"{place}: templates must be sentences with {{}} for the class name, got {templates!r}.")
    return tuple(map(str, templates))


def _classes(classes: Any, path: Path) -> tuple[str, ...]:
    """Names as listed, or ImageNet's as open_clip has them, all or by index."""
    if isinstance(classes, Mapping):
        import open_clip

        unknown = set(classes) - {"open_clip", "indices"}
        if unknown or classes.get("open_clip") != "imagenet":
            raise ValueError(f"{path}: classes are a list, or `open_clip: imagenet` with `indices`.")
        every = open_clip.IMAGENET_CLASSNAMES
        indices = classes.get("indices", range(len(every)))
        whole = isinstance(indices, (list, range)) and all(type(index) is int for index in indices)
        if not whole or not all(0 <= index < len(every) for index in indices):
            raise ValueError(f"{path}: `indices` must be whole numbers from 0 to {len(every) - 1}.")
        return tuple(every[index] for index in indices)
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"{path}: classes must be names in label order; put quotes around numbers, yes and no.")
    return tuple(classes)
