"""Your own images: a folder per task, and in it a folder per class."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safemerge_pl.data.image_files import IMAGE_ENDINGS, rows_of_files
from safemerge_pl.data.image_sets import find_templates
from safemerge_pl.data.images import ImageSet
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.runtime.files import local_path
from safemerge_pl.runtime.names import did_you_mean, name_list

__all__ = ["ImageFolderData"]


class ImageFolderData(StreamDataModule):
    """Images in folders: ``root/<task>/<split>/<class>/*.jpg``, or ``root/<task>/<class>/*.jpg`` without a split.

    A class is called like its folder, with spaces for underscores, or as ``classes`` words it.

    Args:
        root: the folder with one folder per task.
        tasks: names of those folders in the order of the stream; all of them, sorted, if left out.
        controls: names of further folders, which are scored and not merged.
        classes: what folders are called in the prompts, by the name of the folder, or by ``<task>/<folder>`` where two
            tasks have a folder of one name.
        templates: sentences with ``{}`` for the class name, or ``openai``, ``simple`` or ``single``; or a mapping from
            task to these, and ``single`` for the tasks that it leaves out.
        split: the folder below a task that holds its test images.
        order_seed: shuffles the tasks; see :class:`safemerge_pl.data.stream.TaskStream`.
        batch_size: images per batch.
        num_workers: processes that decode images.
        limit: score so many images of each set alone, evenly spread, to try things out.

    Raises:
        ValueError: if the root or a task is not there, or ``classes`` names a folder that is not.
    """

    def __init__(
        self,
        root: str,
        tasks: list[str] | str | None = None,
        controls: list[str] | str = (),  # type: ignore[assignment]  # a default that nobody can change
        classes: dict[str, str] | None = None,
        templates: str | list[str] | dict[str, str | list[str]] = "single",
        split: str = "test",
        order_seed: int | None = None,
        batch_size: int = 128,
        num_workers: int = 4,
        limit: int | None = None,
    ) -> None:
        self.root, self.split, self.limit = local_path(root), split, limit
        if limit is not None and limit < 1:
            raise ValueError(f"`limit` must be at least 1, got {limit}.")
        there, held_out = _folders(self.root, "the root of the images"), name_list(controls, "controls")
        names = [name for name in there if name not in held_out] if tasks is None else name_list(tasks, "tasks")
        missing = next((name for name in (*names, *held_out) if name not in there), None)
        if missing is not None:
            raise ValueError(f"{self.root} has no folder '{missing}'; {did_you_mean(missing, there)}")
        super().__init__(names, held_out, order_seed, batch_size, num_workers)
        self._folders = {name: self._class_folders(name) for name in (*names, *held_out)}
        self.classes = dict(classes or {})
        self._require_known_classes()
        by_task = templates if isinstance(templates, Mapping) else dict.fromkeys(self._folders, templates)
        stray = next((name for name in by_task if name not in self._folders), None)
        if stray is not None:
            raise ValueError(f"`templates` names '{stray}', no task or control set; {did_you_mean(stray, there)}")
        self.templates = {
            name: find_templates(by_task.get(name, "single"), f"`templates` of {name}") for name in self._folders
        }

    def load_set(self, name: str) -> ImageSet:
        """Find the images of a task."""
        folders = self._folders[name]
        files = [(file, label) for label, folder in enumerate(folders) for file in _images(folder)]
        if not files:
            raise ValueError(
                f"set '{name}': {folders[0].parent} has no images in its folders ({', '.join(IMAGE_ENDINGS)})."
            )
        if self.limit is not None and self.limit < len(files):
            files = [files[place * len(files) // self.limit] for place in range(self.limit)]
        names = [folder.name for folder in folders]
        rows = rows_of_files([file for file, _ in files], [label for _, label in files], names)
        return ImageSet(name, rows, tuple(self._word(name, each) for each in names), self.templates[name])

    def settings(self) -> dict[str, Any]:
        """Where the images lie, and how they are asked for."""
        names = {name: [self._word(name, folder.name) for folder in found] for name, found in self._folders.items()}
        return {"root": str(self.root), "classes": names, "templates": self.templates, "limit": self.limit}

    def _class_folders(self, task: str) -> list[Path]:
        """Folders of the classes, sorted."""
        place = self.root / task
        inner = place / self.split
        if inner.is_dir():
            return [inner / name for name in _folders(inner, f"task '{task}'")]
        names = _folders(place, f"task '{task}'")
        if {"train", "training", "val", "validation"} & {*names}:
            raise ValueError(f"{place} has no folder '{self.split}' but {', '.join(names)}; set the data's `split`.")
        return [place / name for name in names]

    def _require_known_classes(self) -> None:
        """Refuse a wording for a folder that is nowhere: a typing error would leave the class without it."""
        pairs = [(task, folder.name) for task, found in self._folders.items() for folder in found]
        known = {name for task, folder in pairs for name in (folder, f"{task}/{folder}")}
        stray = next((name for name in self.classes if name not in known), None)
        if stray is not None:
            raise ValueError(
                f"`classes` words '{stray}', and no task has such a folder; {did_you_mean(stray, sorted(known))}"
            )

    def _word(self, task: str, folder: str) -> str:
        wording = self.classes.get(f"{task}/{folder}", self.classes.get(folder))
        return folder.replace("_", " ") if wording is None else wording


def _folders(place: Path, what: str) -> list[str]:
    """Names of the folders in a place, sorted; hidden ones are passed over."""
    if not place.is_dir():
        raise ValueError(f"{what}: {place} is no folder.")
    found = sorted(path.name for path in place.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    if not found:
        raise ValueError(f"{what}: {place} holds no folders; expected <task>/<class>/<image> below the root.")
    return found


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_ENDINGS and path.is_file())
