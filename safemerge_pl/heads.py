"""Zero-shot heads: class names and templates through the pretrained text tower (METHODS 13)."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from safemerge_pl.backbones import Backbone
from safemerge_pl.report import write_bytes

__all__ = ["cache_folder", "zero_shot_head"]

FEW_TEXTS = 1024
"""Heads of fewer texts are computed each time: that takes no longer than looking them up."""


@torch.no_grad()
def zero_shot_head(
    backbone: Backbone, classes: Sequence[str], templates: Sequence[str], *, batch_size: int = 512
) -> Tensor:
    """One unit vector a class: text features normalised, averaged over templates, normalised again.

    A head of many texts is kept on disk under a hash of the text tower's weights, the tokenizer and the texts, and
    taken from there the next time.

    Args:
        backbone: loaded; its text tower is the pretrained one.
        classes: names in the order of the labels.
        templates: sentences with ``{}`` in the place of the class name.
        batch_size: texts a pass.

    Returns:
        ``(len(classes), D)`` float32. An image's class is the row of largest product with its feature vector.

    Raises:
        ValueError: if there is no class or no template, or a template lacks ``{}``.
    """
    if not classes or not templates:
        raise ValueError(f"a head needs classes and templates, got {len(classes)} and {len(templates)}.")
    for template in templates:
        if "{}" not in template:
            raise ValueError(f"the template {template!r} has no {{}} for the class name.")
    texts = [template.replace("{}", name) for name in classes for template in templates]
    kept = _place(backbone, texts, len(classes)) if len(texts) >= FEW_TEXTS else None
    head = None if kept is None else _read(kept, len(classes))
    if head is None:
        features = torch.cat(
            [backbone.encode_text(texts[start : start + batch_size]) for start in range(0, len(texts), batch_size)]
        )
        means = normalize(features.float(), dim=-1).view(len(classes), len(templates), -1).mean(1)
        head = normalize(means, dim=-1)
        if kept is not None:
            _write(kept, head)
    return head


def cache_folder() -> Path | None:
    """Where results that take long are kept: ``SAFEMERGE_CACHE``, or the user's cache; ``None`` if it is set empty."""
    place = os.environ.get("SAFEMERGE_CACHE")
    if place is None:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "safemerge_pl"
    return Path(place).expanduser() if place else None


def _place(backbone: Backbone, texts: Sequence[str], classes: int) -> Path | None:
    """File of a head; ``None`` where none may be kept or the text side cannot be told apart from others."""
    folder, key = cache_folder(), backbone.text_key()
    if folder is None or key is None:
        return None
    content = json.dumps([key, classes, *texts])
    return folder / "heads" / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.safetensors"


def _read(path: Path, classes: int) -> Tensor | None:
    """A kept head; a damaged one is as good as none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        head = load_file(path)["head"]
    except (OSError, SafetensorError, KeyError):
        return None
    return head if head.ndim == 2 and len(head) == classes and bool(torch.isfinite(head).all()) else None


def _write(path: Path, head: Tensor) -> None:
    """Keep a head, unless the place cannot be written: then the next run computes it again."""
    from safetensors.torch import save

    with suppress(OSError):
        write_bytes(path, save({"head": head.contiguous().cpu()}))
