"""Zero-shot heads: class names and templates through the pretrained text tower."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from safemerge_pl.backbones.base import Backbone
from safemerge_pl.runtime.disk_cache import cache_file, cache_folder, load_tensor, save_tensor
from safemerge_pl.runtime.names import name_list

__all__ = ["zero_shot_head"]

FEW_TEXTS = 1024
"""Heads of fewer texts are computed each time: that takes no longer than looking them up."""


@torch.no_grad()
def zero_shot_head(
    backbone: Backbone, classes: str | Sequence[str], templates: str | Sequence[str], *, batch_size: int = 512
) -> Tensor:
    """One unit vector per class: text features normalised, averaged over templates, normalised again.

    A head of many texts is kept on disk under a hash of the text tower's weights, the tokenizer and the texts, and
    taken from there the next time.

    Args:
        backbone: loaded; its text tower is the pretrained one.
        classes: names in the order of the labels.
        templates: sentences with ``{}`` in the place of the class name.
        batch_size: texts per pass.

    Returns:
        ``(len(classes), D)`` float32. An image's class is the row of largest product with its feature vector.

    Raises:
        ValueError: if there is no class or no template, or a template lacks ``{}``.
    """
    classes, templates = name_list(classes, "classes"), name_list(templates, "templates")
    if not classes or not templates:
        raise ValueError(f"a head needs classes and templates, got {len(classes)} and {len(templates)}.")
    for template in templates:
        if "{}" not in template:
            raise ValueError(f"the template {template!r} has no {{}} for the class name.")
    texts = [template.replace("{}", name) for name in classes for template in templates]
    file = _file(backbone, texts, len(classes)) if len(texts) >= FEW_TEXTS else None
    head = load_tensor(file)
    if head is None or head.ndim != 2 or len(head) != len(classes) or not torch.isfinite(head).all():
        features = torch.cat(
            [backbone.encode_text(texts[start : start + batch_size]) for start in range(0, len(texts), batch_size)]
        )
        means = normalize(features.float(), dim=-1).view(len(classes), len(templates), -1).mean(1)
        head = normalize(means, dim=-1)
        save_tensor(file, head)
    return head


def _file(backbone: Backbone, texts: Sequence[str], classes: int) -> Path | None:
    """File of a head; ``None`` where none may be kept or the text side cannot be told apart from others."""
    key = None if cache_folder() is None else backbone.text_key()
    return None if key is None else cache_file("heads", [key, classes, *texts])
