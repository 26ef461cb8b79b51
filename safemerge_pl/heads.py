"""Zero-shot heads: class names and templates through the pretrained text tower (METHODS 13)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from safemerge_pl.backbones import Backbone

__all__ = ["zero_shot_head"]


@torch.no_grad()
def zero_shot_head(
    backbone: Backbone, classes: Sequence[str], templates: Sequence[str], *, batch_size: int = 512
) -> Tensor:
    """One unit vector a class: text features normalised, averaged over templates, normalised again.

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
    features = torch.cat(
        [backbone.encode_text(texts[start : start + batch_size]) for start in range(0, len(texts), batch_size)]
    )
    means = normalize(features.float(), dim=-1).view(len(classes), len(templates), -1).mean(1)
    return normalize(means, dim=-1)
