"""Open a split of an image set, from the hub's cache or from a folder, as rows with ``image`` and ``label``.

Only the files of the split are fetched; images stay compressed on disk until a batch asks for them.
"""

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from safemerge_pl.data.image_checks import NAMES_FILE, check_rows, is_like
from safemerge_pl.data.image_sets import SetSpec
from safemerge_pl.runtime.files import local_path

__all__ = ["IMAGE_ENDINGS", "choose_files", "open_rows", "rows_of_files"]

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm")


def open_rows(spec: SetSpec, folder: str | None = None, cache_dir: str | None = None, *, any_size: bool = False) -> Any:
    """Rows of a set, checked against its description.

    Args:
        spec: what is expected.
        folder: with one sub-folder per set; the hub's cache or the hub if left out.
        cache_dir: where fetched and prepared files are kept; the libraries' own places if left out.
        any_size: take a split of another size than the description says.

    Returns:
        A ``datasets.Dataset`` with the columns ``image`` and ``label``.

    Raises:
        ValueError: if it is not there or is something else, in one sentence with the remedy.
    """
    place = _in_folder(spec, folder) if folder is not None else _from_hub(spec, cache_dir)
    rows = _read(place, spec, cache_dir)
    return check_rows(rows, spec, place, any_size)


def choose_files(paths: Sequence[str], split: str, config: str | None = None) -> list[str]:
    """The files of one split: parquet files, else tar archives (web data sets), else images in folders.

    Files of a split start with its name (``data/test-00000-of-00002.parquet``) or lie in a folder of its name
    (``test/0.tar``, ``test/cat/1.png``).

    Raises:
        ValueError: if shards are missing, or several configurations have such a split.

    Example:
        >>> choose_files(["README.md", "data/test-00000-of-00001.parquet", "data/train-00000-of-00001.parquet"], "test")
        ['data/test-00000-of-00001.parquet']
    """
    own = re.compile(rf"^(?P<top>(?:.*?/)??){re.escape(split)}(?:[-_]\d[\w-]*|/.*)?\.\w+$")
    found: dict[str, dict[str, list[str]]] = {}  # kind of file -> what stands before the split -> files
    for path in sorted(paths):
        match = own.match(path)
        suffix = PurePosixPath(path).suffix.lower()
        kind = "images" if suffix in IMAGE_ENDINGS else suffix
        if match and kind in (".parquet", ".tar", "images"):
            found.setdefault(kind, {}).setdefault(match["top"], []).append(path)
    for kind in (".parquet", ".tar", "images"):
        tops = found.get(kind, {})
        if config is not None and len(tops) > 1:
            tops = {top: files for top, files in tops.items() if config in PurePosixPath(top).parts}
        if len(tops) > 1:
            raise ValueError(
                f"several configurations have a split '{split}' ({', '.join(tops)}); name one as `config`."
            )
        for files in tops.values():
            _require_all_shards(files)
            return files
    return []


def _require_all_shards(files: Sequence[str]) -> None:
    """``...-00001-of-00003...``: all three must be there."""
    shards = [match for file in files if (match := re.search(r"-(\d+)-of-(\d+)", file))]
    if shards and len(shards) < int(shards[0][2]):
        here = {int(match[1]) for match in shards}
        missing = [str(index) for index in range(int(shards[0][2])) if index not in here]
        raise ValueError(
            f"shards {', '.join(missing)} of {int(shards[0][2])} are missing beside {files[0]}; fetch them again."
        )


def _in_folder(spec: SetSpec, folder: str) -> list[Path]:
    root = local_path(folder) / spec.name
    if not root.is_dir():
        raise ValueError(f"set '{spec.name}': {root} does not exist; {_offline(spec)}")
    return _files_under(root, spec)


def _files_under(root: Path, spec: SetSpec) -> list[Path]:
    names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    try:
        chosen = choose_files(names, spec.split, spec.config)
    except ValueError as error:
        raise ValueError(f"set '{spec.name}' in {root}: {error}") from error
    if not chosen:
        raise ValueError(
            f"set '{spec.name}': {root} has no split '{spec.split}', that is {spec.split}-*.parquet, "
            f"{spec.split}/*.tar or {spec.split}/<class>/<image>; it has {', '.join(sorted(names)[:3]) or 'no files'}."
        )
    return [root / name for name in chosen]


def _from_hub(spec: SetSpec, cache_dir: str | None) -> list[Path]:
    """Files of the split in the hub's local cache, fetched if the hub is reachable."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    kept = None if cache_dir is None else str(local_path(cache_dir) / "hub")
    online = not constants.HF_HUB_OFFLINE and _hub_answers(constants.ENDPOINT)
    reason = "" if online else "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub does not answer"
    for revision in (None, "refs/convert/parquet"):  # the hub converts what was uploaded as scripts or loose images
        try:
            return _files_under(_snapshot(spec, revision, kept, online), spec)
        except (HfHubHTTPError, OSError, ValueError) as error:
            lines = str(error).splitlines()
            reason = reason or (lines[0] if lines else type(error).__name__).removesuffix(".")
    raise ValueError(
        f"set '{spec.name}' ({spec.hub}) is not in the local cache and cannot be fetched ({reason}); {_offline(spec)}"
    )


def _snapshot(spec: SetSpec, revision: str | None, kept: str | None, online: bool) -> Path:
    """Folder in the hub's cache with the files of the split."""
    from huggingface_hub import HfApi, snapshot_download

    what: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
    wanted = None
    if online:
        wanted = choose_files(HfApi().list_repo_files(spec.hub, **what), spec.split, spec.config)
        if not wanted:
            raise ValueError(f"the hub has no files of a split '{spec.split}'")
        wanted = [*wanted, NAMES_FILE]
    return Path(snapshot_download(spec.hub, **what, cache_dir=kept, allow_patterns=wanted, local_files_only=not online))


@cache
def _hub_answers(endpoint: str) -> bool:
    """Asked once: the client's own retries would take a minute for each set."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=10)
    except Exception:  # what means "no connection" differs by version of the client
        return False
    return True


def _offline(spec: SetSpec) -> str:
    """How to get a set to a machine that does not reach the hub."""
    patterns = f"'*{spec.split}-*' '*{spec.split}/*'" + f" {NAMES_FILE}" * (spec.label == "cls")
    return (
        f"where the hub is reachable run `hf download {spec.hub} --repo-type dataset --include {patterns} --local-dir "
        f"SETS/{spec.name}`, copy SETS here and set the data's `folder` to it (images as {spec.split}/<class>/<image> "
        "will do, too)."
    )


def _read(files: Sequence[Path], spec: SetSpec, cache_dir: str | None) -> Any:
    """The rows, memory-mapped; a first use prepares parquet files and archives once."""
    import datasets

    if files[0].suffix.lower() in IMAGE_ENDINGS:
        folders = [file.parent.name for file in files]
        names = sorted(set(folders))
        _warn_of_other_names(spec, names)
        return rows_of_files(files, [names.index(folder) for folder in folders], names)
    builder = "parquet" if files[0].suffix == ".parquet" else "webdataset"
    prepared = None if cache_dir is None else str(local_path(cache_dir) / "prepared")
    try:
        with _bars_on_terminals_only():
            return datasets.load_dataset(
                builder, data_files={"rows": [str(file) for file in files]}, split="rows", cache_dir=prepared
            )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        lines = str(error.__cause__ or error).splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ValueError(f"set '{spec.name}': {files[0]} cannot be read ({reason}); fetch it again.") from error


def rows_of_files(files: Sequence[Path], labels: Sequence[int], names: Sequence[str]) -> Any:
    """Image files as rows that are decoded when they are read.

    Args:
        files: of the images.
        labels: index of each one's class.
        names: of the classes, in label order.

    Returns:
        A ``datasets.Dataset`` with the columns ``image`` and ``label``.
    """
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
    columns = {"image": [str(file) for file in files], "label": list(labels)}
    return datasets.Dataset.from_dict(columns, features=features)


def _warn_of_other_names(spec: SetSpec, folders: Sequence[str]) -> None:
    """Say so where no class is called like its folder: nothing shows then that both are in one order."""
    pairs = list(zip(folders, spec.classes, strict=False))
    if len(folders) == len(spec.classes) and not any(is_like(*pair) for pair in pairs):
        shown = ", ".join(f"'{name}' for the folder {folder}" for folder, name in pairs[:3])
        warnings.warn(
            f"set '{spec.name}': no class is called like its folder ({shown}); if {spec.name}.yaml does not list the "
            "classes in the order of the sorted folders, every score is wrong. `ImageFolderData` takes a wording for "
            "each folder by name.",
            stacklevel=2,
        )


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """The library's progress bars would fill a log file."""
    import datasets

    enabled = datasets.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if enabled:
            datasets.enable_progress_bars()
