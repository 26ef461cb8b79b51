"""Everything of a model's folder but its weights: configuration, tokenizer, processor, templates."""

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from safemerge_pl.checkpoints.open import Checkpoint, CheckpointError
from safemerge_pl.checkpoints.refusals import WEIGHT_ENDINGS
from safemerge_pl.output.files import CARD_FILE, LEDGER_FILE, STATE_FILE

__all__ = ["OutputDtype", "copy_side_files", "output_notes", "side_files"]

OutputDtype = Literal["same", "float32", "bfloat16", "float16"]
_WEIGHTS = (*WEIGHT_ENDINGS, ".pkl", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf")
_TEXT = (".json", ".txt", ".jinja", ".model", ".md")
_OURS = (STATE_FILE, LEDGER_FILE, CARD_FILE)
_MOST = 64 * 2**20
_STALE = ("quantization_config", "compression_config", "_name_or_path", "_commit_hash")
"""What a configuration says of weights that are not those of the output."""


def side_files(folder: Path, *, code: bool = False) -> list[Path]:
    """Paths below a model's folder that belong into an output, relative to it.

    These are its own files but weights, indexes, code and what an earlier merge wrote, and its sub-folders of nothing
    but small text and vocabulary files (``additional_chat_templates``, ``1_Pooling``).

    Raises:
        CheckpointError: if a file is a link to nowhere.
    """
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            found += _texts(path) or []
        elif path.is_symlink() and not path.exists():
            raise CheckpointError(f"{path} is a link to a file that is gone; fetch it again.")
        elif path.suffix == ".py":
            found += [path] if code else []
        elif path.is_file() and path.name not in _OURS and not path.name.endswith((*_WEIGHTS, ".index.json")):
            found.append(path)
    return [path.relative_to(folder) for path in found]


def copy_side_files(base: Path, staging: Path, dtype: OutputDtype, *, code: bool = False) -> None:
    """Copy them, byte for byte but for the parts of a configuration that would be wrong beside the new weights.

    Args:
        base: folder of the pretrained model.
        staging: folder to write in.
        dtype: of the written weights; ``"same"`` leaves the configuration's as it is.
        code: also copy the model's own Python files, and keep the references to them (``auto_map``).

    Raises:
        CheckpointError: if a configuration is no JSON object.
    """
    for path in side_files(base, code=code):
        target = staging / path
        target.parent.mkdir(parents=True, exist_ok=True)
        settings = _settings(base / path) if path.name.endswith("config.json") and path.parent == Path() else None
        adapted = None if settings is None else _adapt(settings, path.name == "config.json", dtype, code)
        if adapted == settings:
            shutil.copyfile(base / path, target)
        else:
            target.write_text(json.dumps(adapted, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def output_notes(base: Checkpoint, *, code: bool = False) -> list[str]:
    """What an output made from this pretrained model lacks, and what was left out on purpose; a sentence each."""
    if base.folder is None:
        return [
            f"{base.source} is no folder, so the output holds weights alone: add config.json, tokenizer and processor "
            "files, or give the model's folder as `pretrained`, or as the `template` of `save`"
        ]
    return list(_folder_notes(base.folder, code))


def _folder_notes(folder: Path, code: bool) -> Iterator[str]:
    if not (folder / "config.json").exists() and not (folder / "open_clip_config.json").exists():
        yield f"{folder} holds no config.json, so the output has none either: most libraries need one"
    scripts = sorted(path.name for path in folder.glob("*.py"))
    if scripts and not code:
        yield (
            f"the model's own code ({', '.join(scripts)}) was not copied, nor the references to it; ask for it with "
            "`copy_code` if you trust it"
        )
    if (folder / "config.json").exists() and "quantization_config" in (_settings(folder / "config.json") or {}):
        yield "`quantization_config` was left out of config.json: the weights are plain floating-point numbers"
    left = [path.name for path in sorted(folder.iterdir()) if path.is_dir() and _texts(path) is None]
    left = [name for name in left if not name.startswith((".", "__"))]
    if left:
        yield f"the sub-folders {', '.join(left)} of {folder} were not copied: they hold more than small text files"
    problem = _generation_problem(folder)
    if problem:
        yield f"generation_config.json was copied as it is, but transformers would refuse to save it: {problem}"


def _texts(folder: Path) -> list[Path] | None:
    """The files of a sub-folder of nothing but small text and vocabulary files; ``None`` for any other."""
    files = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    texts = all(path.is_file() and path.name.endswith(_TEXT) for path in files)
    hidden = folder.name.startswith(".")
    return None if hidden or not texts or sum(path.stat().st_size for path in files) > _MOST else files


def _settings(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file, ``None`` for anything but an object in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        if path.name != "config.json":
            return None
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch it again.") from error
    return content if isinstance(content, dict) else None


def _adapt(
    settings: dict[str, Any], is_model: bool, dtype: OutputDtype, code: bool, *, tower: bool = False
) -> dict[str, Any]:
    """Make a configuration fit the new weights, and those of its towers likewise."""
    dropped = {*(_STALE if is_model else ()), *(() if code else ("auto_map",))}
    found = {key: value for key, value in settings.items() if key not in dropped}
    if not is_model:
        return found
    for key, value in found.items():
        if isinstance(value, dict) and key.endswith("_config"):
            found[key] = _adapt(value, True, dtype, code, tower=True)
    if dtype != "same" and (not tower or {"dtype", "torch_dtype"} & found.keys()):
        found.pop("torch_dtype", None)
        found["dtype"] = dtype
    return found


def _generation_problem(folder: Path) -> str | None:
    """Why transformers' own check of the generation settings fails."""
    path = folder / "generation_config.json"
    if not path.exists():
        return None
    from transformers import GenerationConfig

    try:
        with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            GenerationConfig(**(_settings(path) or {})).save_pretrained(place)
    except (ValueError, TypeError, AttributeError) as error:
        return " ".join(str(error).split())[:300]
    return None
