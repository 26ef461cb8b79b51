"""GLUE as text to text, with the prompts of the published Flan-T5 experts."""

import json
import math
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.data.texts import TextSet
from safemerge_pl.runtime.files import local_path
from safemerge_pl.runtime.names import name_list

__all__ = ["GLUEData"]


class GLUEData(StreamDataModule):
    """Validation splits of GLUE (MNLI: matched); five tasks are merged, three are held out, as in the paper.

    Args:
        tasks: CoLA, MRPC, QQP, SST-2 and STS-B if left out.
        controls: held-out sets; MNLI, QNLI and RTE if left out.
        order_seed: see :class:`safemerge_pl.data.stream.TaskStream`. The paper keeps the order as given.
        batch_size: prompts per batch.
        folder: where the data are, laid out as on the hub: ``cola/validation-00000-of-00001.parquet``. Also read are
            ``cola/validation.parquet``, ``cola/validation.jsonl`` and a data set that ``save_to_disk`` wrote to
            ``cola``. If left out the hub's files are taken, from the local cache where they are there.
        dataset: hub id.
        revision: branch, tag or commit on the hub.
        max_rows: only the first rows of every set, for a trial; the scores are then not the benchmark's.
        num_workers: processes that tokenise; 0 does it in the main process.

    Example:
        >>> data = GLUEData(order_seed=None)
        >>> data.stream.names, data.controls, data.expected["individual"]["mrpc"]
        (('cola', 'mrpc', 'qqp', 'sst2', 'stsb'), ('mnli', 'qnli', 'rte'), 0.875)
    """

    def __init__(
        self,
        tasks: list[str] | str | None = None,
        controls: list[str] | str | None = None,
        order_seed: int | None = None,
        batch_size: int = 32,
        folder: str | None = None,
        dataset: str = "nyu-mll/glue",
        revision: str | None = None,
        max_rows: int | None = None,
        num_workers: int = 0,
    ) -> None:
        about = _about()
        names = about["tasks"] if tasks is None else name_list(tasks, "tasks")
        held_out = about["controls"] if controls is None else name_list(controls, "controls")
        unknown = [name for name in (*names, *held_out) if name not in about["sets"]]
        if unknown:
            raise ValueError(f"GLUE has no set '{unknown[0]}' here; there are {', '.join(about['sets'])}.")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"`max_rows` must be at least 1, got {max_rows}.")
        super().__init__(names, held_out, order_seed, batch_size, num_workers)
        self.folder, self.dataset_id, self.revision = folder, dataset, revision
        self.max_rows = max_rows

    @property
    def expected(self) -> dict[str, dict[str, float]]:
        """Published scores of google/flan-t5-base and its experts on their own tasks; none for a part of the rows."""
        if self.max_rows is not None:
            return {}
        sets, names = _about()["sets"], (*self.stream, *self.controls)
        return {
            "pretrained": {name: sets[name]["pretrained"] / 100 for name in names},
            "individual": {name: sets[name]["expert"] / 100 for name in self.stream},
        }

    def settings(self) -> dict[str, Any]:
        """See :class:`StreamDataModule`."""
        place = {"folder": self.folder} if self.folder else {"dataset": self.dataset_id, "revision": self.revision}
        return {**place, "max_rows": self.max_rows}

    def load_set(self, name: str) -> TextSet:
        """Find, read and check a set.

        Raises:
            ValueError: if it is not there, or is not GLUE's: one sentence with every difference.
        """
        about = _about()["sets"][name]
        place = (self._downloaded(name, about["split"]) if self.folder is None else local_path(self.folder)) / name
        rows = _read(place, about["split"])
        if self.max_rows is not None:
            rows = rows.select(range(min(self.max_rows, len(rows))))
        problems = list(_problems(rows, about))
        if problems:
            raise ValueError(f"{place}, split '{about['split']}': {'; '.join(problems)}.")
        return TextSet(name, rows, about["prompt"], tuple(about["answers"]), about["metric"])

    def _downloaded(self, name: str, split: str) -> Path:
        """The data set's folder in the hub's local cache, with the files of one split."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            found = snapshot_download(
                self.dataset_id,
                repo_type="dataset",
                revision=self.revision,
                allow_patterns=[f"{name}/{split}-*.parquet", f"{name}/{split}.parquet"],
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
            raise ValueError(
                f"{name} of {self.dataset_id} is not in the local cache and cannot be fetched ({reason}); run once "
                "with a network, or give `folder`."
            ) from error
        return Path(found)


@cache
def _about() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(__file__).parent / "glue.json").read_text())
    return content


def _read(place: Path, split: str) -> Any:
    """The rows of a split as a ``datasets.Dataset``, without a copy in the user's cache."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    shards = sorted(place.glob(f"{split}-*.parquet")) or [place / f"{split}.parquet"]
    try:
        if shards[0].exists():
            return datasets.Dataset(pyarrow.concat_tables([parquet.read_table(shard) for shard in shards]))
        if (place / f"{split}.jsonl").exists():
            lines = (place / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
            return datasets.Dataset.from_list([json.loads(line) for line in lines if line.strip()])
        if (place / split / "dataset_info.json").exists():
            return datasets.load_from_disk(str(place / split))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{place}, split '{split}': cannot be read ({error}); fetch it again.") from error
    there = ", ".join(sorted(path.name for path in place.iterdir())) if place.is_dir() else "no such folder"
    raise ValueError(
        f"{place} has no split '{split}' ({there}); expected {split}-*.parquet, {split}.parquet, {split}.jsonl or a "
        "data set that save_to_disk wrote."
    )


def _problems(rows: Any, about: dict[str, Any]) -> Iterator[str]:
    """What makes a table no split of this set that can be scored."""
    columns = [field for _, field, _, _ in string.Formatter().parse(about["prompt"]) if field]
    absent = [column for column in (*columns, "label") if column not in rows.column_names]
    if absent:
        yield f"it has no column '{absent[0]}' but {', '.join(rows.column_names)}"
        return
    if not len(rows):
        yield "it is empty"
        return
    for column in columns:
        odd = [value for value in rows[column] if not isinstance(value, str)]
        if odd:
            yield f"column '{column}' holds {odd[0]!r} where a text should stand"
    names = getattr(rows.features["label"], "names", None)
    if names is not None and list(names) != about["labels"]:
        yield f"its labels are {', '.join(names)}, GLUE's are {', '.join(about['labels']) or 'numbers'}"
    labels = list(rows["label"])
    if -1 in labels:
        yield "it has the label -1, as the test split has, whose labels are hidden; give the validation split"
    elif about["answers"]:
        wrong = [label for label in labels if not isinstance(label, int) or not 0 <= label < len(about["answers"])]
        if wrong:
            yield f"it has the label {wrong[0]!r}, but only 0 to {len(about['answers']) - 1} have an answer"
    else:
        wrong = [label for label in labels if not isinstance(label, (int, float)) or not math.isfinite(label)]
        if wrong:
            yield f"it has the label {wrong[0]!r} where a number should stand"
