"""Where results of a study are kept: under a hash of everything that they depend on."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.backbones.base import Backbone, cache_key
from safemerge_pl.checkpoints.open import Source
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.runtime.files import local_path
from safemerge_pl.version import __version__

__all__ = ["hash_result", "read_kept"]


def hash_result(
    backbone: Backbone, data: StreamDataModule, sources: Mapping[str, Source], extra: Mapping[str, Any]
) -> str:
    """Hash everything that a result depends on; experts by path, size and time of change.

    Args:
        backbone: need not be loaded.
        data: of the stream.
        sources: the expert of each task.
        extra: what else the result depends on, as plain values: order and method of a cell.

    Returns:
        24 hexadecimal digits.
    """
    settings = data.settings()
    content = {
        "version": __version__,
        "backbone": cache_key(backbone),
        "tasks": list(data.stream),
        "controls": list(data.controls),
        "experts": {task: _stamp(source) for task, source in sources.items()},
        **({"data": settings} if settings else {}),
        **extra,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]


def read_kept(path: Path) -> dict[str, Any]:
    """What an earlier run measured; plain values, nothing of which is ever built or called.

    Raises:
        MisconfigurationException: if the file is damaged.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise MisconfigurationException(
            f"{path} is damaged ({error}); remove it, and what it held is measured again."
        ) from error


def _stamp(source: Source) -> list[Any]:
    path = local_path(str(source))
    files = sorted(path.glob("*.safetensors")) + sorted(path.glob("*.bin")) if path.is_dir() else [path]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists()]
    return [str(source), stats]
