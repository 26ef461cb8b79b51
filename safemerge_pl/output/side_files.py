"""Everything of a model's folder but its weights: configuration, tokenizer, processor, templates."""

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from safemerge_pl.checkpoints.open import Checkpoint, CheckpointError
from safemerge_pl.output.base_folder import BaseFiles, sort_files

__all__ = ["OutputDtype", "copy_side_files", "output_notes", "side_files"]

OutputDtype = Literal["same", "float32", "bfloat16", "float16"]
_STALE = ("quantization_config", "compression_config", "_name_or_path", "_commit_hash")
"""What a configuration says of weights that are not those of the output."""


def side_files(folder: Path, *, code: bool = False) -> list[Path]:
    """Paths below a model's folder that belong into an output, relative to it.

    These are its own files but its weights, the same weights in another form, code, what its training left, and what an
    earlier merge wrote; and its sub-folders that the model is made of (``2_Dense``, ``additional_chat_templates``).

    Raises:
        CheckpointError: if a file is a link to nowhere.
    """
    files = sort_files(folder)
    return sorted([*files.copied, *files.code] if code else files.copied)


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
    files = sort_files(folder)
    scripts = [path.as_posix() for path in files.code]
    if scripts and not code:
        yield (
            f"the model's own code ({', '.join(scripts)}) was not copied, nor the references to it; ask for it with "
            "`copy_code` if you trust it"
        )
    if (folder / "config.json").exists() and "quantization_config" in (_settings(folder / "config.json") or {}):
        yield "`quantization_config` was left out of config.json: the weights are plain floating-point numbers"
    yield from _left_out(folder, files)
    problem = _generation_problem(folder)
    if problem:
        yield f"generation_config.json was copied as it is, but transformers would refuse to save it: {problem}"


def _left_out(folder: Path, files: BaseFiles) -> Iterator[str]:
    """What was copied although it holds weights, and what was not copied."""
    if files.heads:
        names = ", ".join(path.as_posix() for path in files.heads)
        pickles = "; a pickle among them can run code when its library loads it" if files.pickles else ""
        yield f"copied as they are, for a merge does not change them: the further weights {names}{pickles}"
    if files.forms:
        yield f"not copied, since they hold the unmerged weights in another form: {', '.join(files.forms)}"
    if files.training:
        yield f"not copied, since they tell of the training of {folder}: {', '.join(files.training)}"
    if files.folders:
        yield (
            f"the sub-folders {', '.join(files.folders)} of {folder} were not copied: they hold data, records of a "
            "training, or weights in another form"
        )


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
