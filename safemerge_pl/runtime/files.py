"""Write files under a temporary name and rename them: a reader never sees a half."""

import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_bytes", "write_figure", "write_json", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it: a reader never sees a half."""
    write_bytes(path, text.encode())


def write_figure(path: Path, figure: "Figure") -> None:
    """A PNG file, written as :func:`write_text` does."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_bytes(path, image.getvalue())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Strict JSON (undefined values are left out, never NaN), written as :func:`write_text` does."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_bytes(path: Path, content: bytes) -> None:
    """As :func:`write_text`, for a file that is no text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
