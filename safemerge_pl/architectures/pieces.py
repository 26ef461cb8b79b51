"""The pieces of a tensor under canonical names, by which the layouts of two libraries are matched."""

from safemerge_pl.architectures.families import OTHER_PIECES, block_of, tower
from safemerge_pl.architectures.layers import MergeLayer, parts_of

__all__ = ["pieces_of"]


def pieces_of(name: str, shape: tuple[int, ...]) -> list[MergeLayer]:
    """The pieces of one tensor under their canonical names; none if it is not known.

    Args:
        name: the tensor's.
        shape: as stored.

    Example:
        >>> [(piece.name, piece.rows) for piece in pieces_of("visual.transformer.resblocks.0.attn.in_proj_bias", (6,))]
        [('vision.0.q.bias', (0, 2)), ('vision.0.k.bias', (2, 4)), ('vision.0.v.bias', (4, 6))]
    """
    try:
        found = parts_of(name, shape)
    except ValueError:  # a fused matrix that has no equal parts
        return []
    for pattern, names in OTHER_PIECES if not found else ():
        match = pattern.search(name)
        if match is None:
            continue
        height = shape[0] // len(names) if shape else 0
        block = block_of(name)
        values = {
            "block": block[1] if block else "",
            "end": name.rpartition(".")[2],
            "group": match[1] if match.re.groups else "",
        }
        return [
            MergeLayer(
                f"{tower(name) if block else 'vision'}.{text.format(**values)}",
                name,
                (height, *shape[1:]),
                (part * height, (part + 1) * height) if len(names) > 1 else None,
            )
            for part, text in enumerate(names)
        ]
    return found
