"""The pieces of a tensor under canonical names, by which the layouts of two libraries are matched."""

import itertools

from safemerge_pl.architectures.cuts import Shapes
from safemerge_pl.architectures.families import OTHER_PIECES, block_of, tower
from safemerge_pl.architectures.layers import MergeLayer, parts_of

__all__ = ["pieces_of"]


def pieces_of(name: str, shapes: Shapes) -> list[MergeLayer]:
    """List the pieces of one tensor under their canonical names; none if the tensor is not known.

    Args:
        name: name of the tensor.
        shapes: those of its whole model, as stored: they tell how it is cut and turned.

    Example:
        >>> name = "visual.transformer.resblocks.0.attn.in_proj_bias"
        >>> [(piece.name, piece.rows) for piece in pieces_of(name, {name: (6,)})]
        [('vision.0.q.bias', (0, 2)), ('vision.0.k.bias', (2, 4)), ('vision.0.v.bias', (4, 6))]
    """
    shape = tuple(shapes[name])
    try:
        found = parts_of(name, shapes)
        matrix = f"{name.removesuffix('bias')}weight"
        cuts = [part.shape[0] for part in parts_of(matrix, shapes)] if not found and matrix in shapes else []
    except ValueError:  # a matrix that cannot be cut, and its bias
        return []
    for pattern, names in OTHER_PIECES if not found else ():
        match = pattern.search(name)
        if match is None:
            continue
        heights = cuts if len(cuts) == len(names) > 1 else [shape[0] // len(names) if shape else 0] * len(names)
        block = block_of(name)
        values = {
            "block": block[1] if block else "",
            "end": name.rpartition(".")[2],
            "group": match[1] if match.re.groups else "",
        }
        start = f"{tower(name) if block else 'vision'}."
        ends = itertools.pairwise(itertools.accumulate(heights, initial=0))
        return [
            MergeLayer(start + text.format(**values), name, (height, *shape[1:]), rows if len(names) > 1 else None)
            for text, height, rows in zip(names, heights, ends, strict=True)
        ]
    return found
