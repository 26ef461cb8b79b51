"""The embedded model zoo: a mini CLIP, experts fine-tuned from it, and their data sets (see ``files/README.md``)."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["Zoo"]

FILES = Path(__file__).parent / "files"


@dataclass(frozen=True)
class Zoo:
    """Paths and descriptions of the zoo.

    Args:
        extra: a folder with more experts and data sets in the same layout (``experts/``, ``data/``, ``zoo.json``),
            which adds to the embedded ones.

    Example:
        >>> zoo = Zoo()
        >>> zoo.tasks()[:2], zoo.controls[0], zoo.expert("mnist").name
        (['mnist', 'fashion'], 'probe1_seen_styles', 'mnist')
    """

    extra: Path | None = None

    @cached_property
    def index(self) -> dict[str, Any]:
        """Content of ``zoo.json``, of the extra folder where there is one."""
        path = FILES / "zoo.json" if self.extra is None else Path(self.extra).expanduser() / "zoo.json"
        if not path.exists():
            raise ValueError(f"`extra_zoo` {self.extra} holds no zoo.json; give a folder in the zoo's layout.")
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    @property
    def model(self) -> Path:
        """Folder of the pretrained CLIP."""
        return FILES / "model"

    def tasks(self, length: int | None = None) -> list[str]:
        """Tasks of the stream of ``length`` tasks, by default the longest there is."""
        streams: dict[str, list[str]] = self.index["streams"]
        lengths = sorted(int(key) for key in streams)
        if length is not None and length not in lengths:
            raise ValueError(f"the zoo has streams of {', '.join(map(str, lengths))} tasks, not {length}.")
        return list(streams[str(length or lengths[-1])])

    @property
    def controls(self) -> list[str]:
        """The held-out probes of general knowledge."""
        return list(self.index["probes"])

    def expert(self, task: str) -> Path:
        """Folder of a task's expert."""
        return self._find("experts", task, "")

    def data(self, name: str) -> Path:
        """Parquet file of a test split or probe, with the columns image and label."""
        return self._find("data", name, ".parquet")

    def describe(self, name: str) -> dict[str, Any]:
        """Classes in label order, templates, source and licence of a set.

        Raises:
            ValueError: if the zoo has no such set.
        """
        sets: dict[str, dict[str, Any]] = self.index["sets"]
        if name not in sets:
            import difflib

            close = difflib.get_close_matches(name, sets, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"it has {', '.join(sets)}."
            raise ValueError(f"the zoo has no set '{name}'; {hint}")
        return sets[name]

    def _find(self, kind: str, name: str, suffix: str) -> Path:
        self.describe(name)
        places = [FILES / kind / f"{name}{suffix}"]
        if self.extra is not None:
            places.append(Path(self.extra).expanduser() / kind / f"{name}{suffix}")
        for place in places:
            if place.exists():
                return place
        raise ValueError(f"the zoo lacks {places[-1]}.")
