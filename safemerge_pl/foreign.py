"""What looks like a model and is none that can be merged: named, and refused with the remedy."""

from pathlib import Path

from safemerge_pl.errors import CheckpointError

__all__ = ["WEIGHT_ENDINGS", "refuse_impostor"]

WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def refuse_impostor(path: Path) -> None:
    """Name what is not a weight file at all but has the name of one."""
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} is a link to a file that is gone; fetch it again.")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a git-lfs pointer of {size} bytes, not the weights; run `git lfs pull`.")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(f"{path} is a web page of {size} bytes, not the weights; fetch it again.")
    if start.startswith(b"GGUF"):
        raise CheckpointError(f"{path} is a quantised GGUF file; give the model in float32, bfloat16 or float16.")
    if not size:
        raise CheckpointError(f"{path} is empty; fetch it again.")
