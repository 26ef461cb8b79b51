"""The files of a base model's folder, sorted by what becomes of them in an output."""

import fnmatch
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safemerge_pl.checkpoints.hub import HEAD_FILES
from safemerge_pl.checkpoints.open import CheckpointError, weight_file
from safemerge_pl.checkpoints.refusals import WEIGHT_ENDINGS
from safemerge_pl.checkpoints.safetensors_files import Safetensors
from safemerge_pl.output.files import CARD_FILE, LEDGER_FILE, MASTER_FILE, STATE_FILE

__all__ = ["BaseFiles", "module_paths", "sort_files"]

_TEXT = (".json", ".txt", ".jinja", ".model", ".md", ".tiktoken", ".metadata")
_PARTS = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".joblib", ".npz")
"""What the weights of a layer behind the model, or of a head, may be stored in."""
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".joblib")
_OTHER_FORMS = (".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ot", ".tflite", ".mlmodel", ".pb")
_WHOLE_MODEL = re.compile(
    r"(?:(?:pytorch_|open_clip_|open_clip_pytorch_|tf_|flax_|rust_|diffusion_pytorch_)?model|consolidated)(?:[.-].*)?"
)
"""Names that libraries give to the weights of a whole model, in whatever form."""
_TRAINING = re.compile(
    r"trainer_state\.json|(?:all|train|eval|predict|test)_results\.json|training_args\.\w+|optimizer.*\.(?:pt|bin|pth)"
    r"|(?:scheduler|scaler)\.(?:pt|bin|pth)|(?:rng_state|random_states).*\.(?:pth|pkl|pt)|events\.out\.tfevents.*|latest"
    r"|checkpoint-\d+|global_step\d+|runs|logs|lightning_logs|wandb|mlruns"
)
"""Files and sub-folders that a training leaves; they would be taken for those of the merge."""
_EXPORTS = ("onnx", "openvino", "coreml", "gguf", "original", "metal")
"""Sub-folders with the base's own weights once more, in another form."""
_OURS = re.compile(
    rf"{re.escape(STATE_FILE)}|{re.escape(LEDGER_FILE)}|{re.escape(CARD_FILE)}|{Path(MASTER_FILE).stem}[.-].*"
)
_MOST = 64 * 2**20


@dataclass
class BaseFiles:
    """What becomes of the files of a base model's folder. Paths are relative to it.

    Its weights are in none of the lists: the merged ones take their place.

    Attributes:
        copied: they belong into an output as they are.
        heads: those of them that hold weights of their own.
        code: the model's own Python files; copied when asked for.
        forms: names of files with the same weights once more.
        training: names of what a training left.
        folders: names of sub-folders that are not copied.
    """

    copied: list[Path] = field(default_factory=list)
    heads: list[Path] = field(default_factory=list)
    code: list[Path] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)
    training: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)

    @property
    def pickles(self) -> list[Path]:
        """Heads whose libraries run code when they load them."""
        return [path for path in self.heads if path.name.endswith(_PICKLES)]


def sort_files(folder: Path) -> BaseFiles:
    """Go through a base model's folder.

    Raises:
        CheckpointError: if a file that belongs into an output is a link to nowhere.
    """
    files, weights = BaseFiles(), _read_files(folder)
    size = sum(path.stat().st_size for path in weights if path.exists())
    modules = {Path(path).parts[0] for path in module_paths(folder)}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            _sort_folder(path, files, size, named=path.name in modules)
        elif path.is_symlink() and not path.exists():
            raise CheckpointError(f"{path} is a link to a file that is gone; fetch it again.")
        elif path.is_file() and path not in weights and not _OURS.fullmatch(path.name):
            _sort_file(path, files, weights, size)
    for name in ("copied", "heads", "code"):
        setattr(files, name, [path.relative_to(folder) for path in getattr(files, name)])
    return files


def module_paths(folder: Path) -> list[str]:
    """Sub-folders of the modules that sentence-transformers puts behind or around a model, as it names them."""
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        return [str(module["path"]) for module in modules if module["path"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _read_files(folder: Path) -> set[Path]:
    """The files that the weights are read from, and their index."""
    read = weight_file(folder)
    if read is None or not read.name.endswith(".index.json"):
        return set() if read is None else {read}
    try:
        shards = json.loads(read.read_text())["weight_map"].values()
        return {read, *(folder / str(name) for name in shards)}
    except (OSError, ValueError, KeyError, AttributeError, RecursionError):  # opening it says what is wrong
        return {read}


def _sort_file(path: Path, files: BaseFiles, weights: set[Path], size: int) -> None:
    if _TRAINING.fullmatch(path.name):
        files.training.append(path.name)
    elif path.suffix == ".py":
        files.code.append(path)
    elif not path.name.endswith((*_PARTS, *WEIGHT_ENDINGS, *_OTHER_FORMS, ".index.json")):
        files.copied.append(path)
    elif _is_head(path, weights, size):
        files.copied.append(path)
        files.heads.append(path)
    else:
        files.forms.append(path.name)


def _is_head(path: Path, weights: set[Path], size: int) -> bool:
    """Whether a file beside the weights holds others: a name of a head, or smaller and of no tensor of the model."""
    if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in HEAD_FILES):
        return True
    if not path.name.endswith(_PARTS) or _WHOLE_MODEL.fullmatch(path.name) or path.stat().st_size >= size:
        return False
    return not set(_names(path)) & {name for file in weights for name in _names(file)}


def _names(path: Path) -> Iterator[str]:
    """Tensor names of a safetensors file; none for any other."""
    if path.suffix == ".safetensors":
        try:
            yield from Safetensors([path], str(path), None)
        except CheckpointError:
            return


def _sort_folder(folder: Path, files: BaseFiles, size: int, *, named: bool) -> None:
    """Sort a sub-folder as a whole; one that the model's own list of modules names is a part of the model."""
    if folder.name.startswith((".", "__")):
        return
    paths = [path for path in sorted(folder.rglob("*")) if not path.is_dir() and "__pycache__" not in path.parts]
    code = [path for path in paths if path.suffix == ".py"]
    inside = [path for path in paths if path.suffix != ".py"]
    if not named and not _belongs(folder, inside, size):
        files.folders.append(folder.name)
        return
    gone = [path for path in paths if not path.exists()]
    if gone:
        raise CheckpointError(f"{gone[0]} is a link to a file that is gone; fetch it again.")
    files.copied += inside
    files.heads += [path for path in inside if path.name.endswith(_PARTS)]
    files.code += code


def _belongs(folder: Path, inside: list[Path], size: int) -> bool:
    """Whether a sub-folder that nothing names is of small text files, or of weights that are less than the model's."""
    if _TRAINING.fullmatch(folder.name) or folder.name in _EXPORTS:
        return False
    if any(_TRAINING.fullmatch(path.name) or not path.name.endswith((*_TEXT, *_PARTS)) for path in inside):
        return False
    if any(not path.is_file() for path in inside):
        return False
    parts = any(path.name.endswith(_PARTS) for path in inside)
    return sum(path.stat().st_size for path in inside) < (size if parts else _MOST)
