"""Model folders on disk: written as transformers does, and looked at."""

from pathlib import Path
from typing import Any

import tiny
from torch import nn


def beside(path: Path) -> list[str]:
    """Everything that lies beside a folder: nothing may be left behind there."""
    return sorted(entry.name for entry in path.parent.iterdir() if entry != path)


def loading_info(kind: Any, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    with tiny.seeded():
        model, info = kind.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    return model, info


def clip_folder(path: Path, kind: str = "clip") -> Path:
    """A folder as transformers writes it, float16, with a tokenizer's file beside."""
    model = (tiny.hf_clip() if kind == "clip" else tiny.hf_vision_model()).half()
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text('{"made": "up"}')
    return path
