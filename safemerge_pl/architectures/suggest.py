"""What to name as ``layers`` where a model is of no known family."""

import re
from collections.abc import Mapping, Sequence

from safemerge_pl.architectures.embeddings import is_embedding

__all__ = ["suggest_layers"]

_MOST = 12
"""Groups that are listed."""


def suggest_layers(shapes: Mapping[str, Sequence[int]]) -> str:
    """The matrices of a model, those of one place in each block together, as patterns to paste.

    Args:
        shapes: shape of every tensor that could be merged.

    Returns:
        The end of a message: what could be named, or which methods need no matrices.

    Example:
        >>> block = {f"trunk.{i}.{part}.weight": (4, 4) for i in range(3) for part in ("mix", "gate")}
        >>> suggest_layers({**block, "head.weight": (2, 4)})
        "its matrices are, as patterns for `layers`: ['trunk.*.mix.weight', 'trunk.*.gate.weight', 'head.weight']"
        >>> suggest_layers({"layer1.0.conv1.weight": (8, 3, 3, 3)}).partition(";")[0]
        'it has no matrices but tensors of other shapes'
    """
    groups: dict[str, int] = {}
    for name, shape in shapes.items():
        if len(shape) == 2 and not is_embedding(name):
            pattern = re.sub(r"(?<![^._])\d+(?![^._])", "*", name)
            groups[pattern] = groups.get(pattern, 0) + 1
    repeated = [pattern for pattern, count in groups.items() if count > 1]
    kernels = sum(len(shape) > 2 for shape in shapes.values())
    if not repeated and kernels:
        few = f"few matrices ({', '.join(groups)})" if groups else "no matrices"
        return (
            f"it has {few} but tensors of other shapes; methods that merge every tensor do, such as TaskArithmetic, "
            "TiesMerging, TSVM or OPCM"
        )
    listed = [*repeated, *(pattern for pattern in groups if pattern not in repeated)]
    more = f", and {len(listed) - _MOST} more" if len(listed) > _MOST else ""
    return f"its matrices are, as patterns for `layers`: {listed[:_MOST]}{more}"
