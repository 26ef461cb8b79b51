"""Write model folders whole or not at all, complete with whatever the base model's folder holds beside its weights."""

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from safemerge_pl.checkpoints import Checkpoint, CheckpointError

__all__ = ["STATE_FILE", "OutputDtype", "check_output", "read_state", "staged_folder", "write_model"]

OutputDtype = Literal["same", "float32", "bfloat16", "float16"]
STATE_FILE = "merge_state.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")


def check_output(folder: Path, inputs: tuple[Path, ...] = ()) -> None:
    """Refuse an output folder that cannot or must not be written, before any work is done.

    A folder that is missing, empty, or holds an earlier merge (``merge_state.json``) may be written.

    Raises:
        CheckpointError: if the folder holds something else, is or lies in an input, or cannot be written.
    """
    _recover(folder)
    resolved = folder.resolve()
    if resolved == Path.cwd() or resolved in Path.cwd().parents:
        raise CheckpointError(f"the output {folder} is or holds the current folder; name another folder.")
    for source in inputs:
        if resolved == source.resolve() or source.resolve() in resolved.parents:
            raise CheckpointError(f"the output {folder} is or lies inside the input {source}; name another folder.")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"the output {folder} is a file; name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / STATE_FILE).exists():
        raise CheckpointError(f"the output {folder} is not empty and holds no earlier merge; name a new folder.")
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    probe = parent / f".safemerge-probe-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"the output {folder} cannot be written ({error.strerror}); name another folder."
        ) from error


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder to write in; on success it takes the place of ``folder``, on failure it vanishes.

    Files in an earlier ``folder`` that the earlier merge did not write are carried over.
    """
    check_output(folder)
    folder = folder.resolve()  # behind a link: the link stays, its target is replaced
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        written = sorted(path.name for path in staging.iterdir())
        state = json.loads((staging / STATE_FILE).read_text())
        (staging / STATE_FILE).write_text(json.dumps(state | {"files": written}, indent=1))
        _carry_over(folder, staging)
        for path in staging.rglob("*"):
            if path.is_file():
                _flush(path)
        _swap(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_model(staging: Path, base: Checkpoint, replaced: Mapping[str, Tensor], dtype: OutputDtype = "same") -> None:
    """Write ``model.safetensors`` and every other file of the base model's folder.

    Args:
        staging: folder to write in.
        base: the pretrained model; its folder, if it has one, gives configuration, tokenizer and processor files.
        replaced: merged tensors by the base's names; all others are written as the base has them.
        dtype: dtype of the floating-point tensors; ``"same"`` keeps that of each tensor in the base.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name in base:
        original = base[name]
        tensor = replaced.get(name, original)
        if original.is_floating_point():
            tensor = tensor.to(original.dtype if dtype == "same" else getattr(torch, dtype))
        tensor = tensor.contiguous()
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()  # a tied tensor or a view: safetensors stores no aliases
        storages.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
    if base.folder is not None:
        for path in sorted(base.folder.iterdir()):
            if path.is_file() and not path.name.endswith((*_WEIGHT_SUFFIXES, ".index.json", ".py")):
                shutil.copyfile(path, staging / path.name)
    config = staging / "config.json"
    if config.exists() and dtype != "same":
        settings = json.loads(config.read_text())
        settings["dtype"] = dtype
        settings.pop("torch_dtype", None)
        config.write_text(json.dumps(settings, indent=2))


def read_state(folder: Path) -> dict[str, Any]:
    """The state of an earlier merge.

    Raises:
        CheckpointError: if the folder holds none.
    """
    _recover(folder)
    path = folder / STATE_FILE
    if not path.exists():
        raise CheckpointError(f"{folder} holds no {STATE_FILE}: it is not the output of a merge.")
    try:
        state = json.loads(path.read_text())
        version = state["format"]
        whole = version != 1 or {"reference", "merged", "method", "reports"} <= state.keys()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fold again from the last whole output.") from error
    if version != 1:
        raise CheckpointError(f"{path} has format {version}, this version reads format 1; use a newer safemerge_pl.")
    if not whole:
        raise CheckpointError(f"{path} is incomplete; fold again from the last whole output.")
    complete: dict[str, Any] = state
    return complete


def _carry_over(folder: Path, staging: Path) -> None:
    """Copy what the user put into an earlier output."""
    if not (folder / STATE_FILE).exists():
        return
    ours = set(read_state(folder).get("files", ()))
    for path in folder.iterdir():
        if path.name in ours or (staging / path.name).exists():
            continue
        if path.is_dir():
            shutil.copytree(path, staging / path.name)
        else:
            shutil.copyfile(path, staging / path.name)


def _flush(path: Path) -> None:
    """Give the file the permissions of the folder's place (safetensors writes for the owner alone), and sync it."""
    path.chmod(stat.S_IMODE(path.parent.stat().st_mode) & 0o666)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _recover(folder: Path) -> None:
    """Bring back an earlier output that a kill between the two renames of :func:`_swap` left aside."""
    aside = sorted(folder.parent.glob(f".{folder.name}.old-*")) if folder.name else []
    if aside and not folder.exists():
        aside[-1].rename(folder)


def _swap(staging: Path, folder: Path) -> None:
    """Put ``staging`` in the place of ``folder``; a reader sees the old folder or the new one."""
    if not folder.exists():
        staging.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    folder.rename(old)
    try:
        staging.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
