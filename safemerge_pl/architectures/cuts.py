"""How a tensor of a known kind lies and where it is cut, by what stands beside it in the same model.

A name alone does not tell: GPT-2's names are also those of models that store the same matrices upright, and one fused
matrix of queries, keys and values has three equal parts in one model and shared key heads in the next.
"""

from collections.abc import Mapping, Sequence

from safemerge_pl.architectures.families import OUT_PROJECTIONS, Rule, block_of, rules_by_name

__all__ = ["Shapes", "cut", "is_turned", "rule_of"]

Shapes = Mapping[str, Sequence[int]]
"""Shape of every tensor of a model, as stored."""

_WIDENING = ("attn.c_attn.weight", "mlp.c_fc.weight")
_NARROWING = "mlp.c_proj.weight"
"""Matrices of GPT-2's names that have more, or fewer, outputs than inputs in every model."""

_GATE = "output_gate"
"""What MiniMax's lightning attention has, which fuses q, k and v head by head under Phi-3's name of three blocks."""

_WHOLE = "name the matrices to merge with `layers`, where it is taken whole"


def rule_of(parameter: str, beside: Shapes) -> tuple[Rule, dict[str, str]] | None:
    """The rule that a tensor of a model falls under and the groups of its name; ``None`` for any other tensor.

    Args:
        parameter: its name.
        beside: shapes of its model, its own among them.

    Raises:
        ValueError: for a square matrix of GPT-2's names that nothing beside it tells the side of.

    Example:
        >>> turned = {"h.0.attn.c_proj.weight": (8, 8), "h.0.mlp.c_fc.weight": (8, 32)}
        >>> upright = turned | {"h.0.mlp.c_fc.weight": (32, 8)}
        >>> [rule_of("h.0.attn.c_proj.weight", shapes)[0].transposed for shapes in (turned, upright)]
        [True, False]
    """
    shape = beside[parameter]
    for rule, groups in rules_by_name(parameter):
        if len(shape) == 2 and (not rule.transposed or _is_turned(rule, parameter, beside)):
            return rule, groups
    return None


def _is_turned(rule: Rule, parameter: str, beside: Shapes) -> bool:
    """GPT-2 stores ``(d_in, d_out)``; GPT-Neo, GPTBigCode, Qwen and nanoGPT have the same names and lie upright."""
    shape = beside[parameter]
    if len(rule.names) > 1:
        return shape[1] == len(rule.names) * shape[0]
    told = is_turned(parameter, beside)
    if told is None:
        raise ValueError(
            f"`{parameter}` of shape {tuple(shape)} is square, and no c_attn or c_fc beside it tells whether its rows "
            "are outputs or, as in GPT-2, inputs: give the model whole, or leave it out with `layers`."
        )
    return told


def is_turned(parameter: str, beside: Shapes) -> bool | None:
    """Whether a matrix of GPT-2's names is stored as ``(d_in, d_out)``; ``None`` if nothing tells, or for other names.

    Args:
        parameter: its name.
        beside: shapes of its model, its own among them.

    Example:
        >>> shapes = {"h.0.attn.c_proj.weight": (8, 8), "h.0.attn.c_attn.weight": (8, 24)}
        >>> [is_turned(name, shapes) for name in shapes]
        [True, True]
    """
    if not any(rule.transposed for rule, _ in rules_by_name(parameter)):
        return None
    told = _side(parameter, beside[parameter])
    if told is None:
        block = block_of(parameter)
        start = parameter[: block.end()] if block else ""
        told = _told(beside, [start + end for end in (*_WIDENING, _NARROWING)])
    if told is None:
        told = _told(beside, [name for name in beside if name.endswith((*_WIDENING, _NARROWING))])
    return told


def _told(beside: Shapes, names: Sequence[str]) -> bool | None:
    """What all of these tensors agree on; ``None`` if they do not, or tell nothing."""
    sides = {_side(name, beside[name]) for name in names if name in beside} - {None}
    return sides.pop() if len(sides) == 1 else None


def _side(name: str, shape: Sequence[int]) -> bool | None:
    """Whether a matrix of unequal sides is stored turned; ``None`` if its shape does not say."""
    if len(shape) != 2 or shape[0] == shape[1] or not name.endswith((*_WIDENING, _NARROWING)):
        return None
    return (shape[0] < shape[1]) != name.endswith(_NARROWING)


def cut(rule: Rule, parameter: str, beside: Shapes) -> list[int]:
    """How many rows of the upright matrix, or entries of its bias, belong to each of a rule's names.

    Args:
        rule: that of the matrix.
        parameter: its name.
        beside: shapes of its model, its own among them.

    Raises:
        ValueError: if it cannot be known.

    Example:
        >>> shapes = {"h.0.attn.qkv.weight": (96, 64), "h.0.attn.proj.weight": (64, 64)}  # 8 heads, 2 of them with keys
        >>> rule, _ = rule_of("h.0.attn.qkv.weight", shapes)
        >>> cut(rule, "h.0.attn.qkv.weight", shapes)
        [64, 16, 16]
    """
    rows, columns = beside[parameter][::-1] if rule.transposed else beside[parameter]
    count, width = len(rule.names), _out_width(parameter, beside)
    if _sibling(parameter, _GATE) in beside:
        raise ValueError(
            f"`{parameter}` holds q, k and v head by head, as the `{_GATE}` beside it tells (lightning attention); "
            f"{_WHOLE}."
        )
    if rule.values:
        return _values_last(rows, width, parameter, beside)
    if not rule.heads:
        return _equal(rows, count, parameter, beside)
    if width is None and not rule.square and rows != count * columns:
        raise ValueError(
            f"`{parameter}` of shape {(rows, columns)} cannot be split into {count} equal parts, each as high as the "
            f"matrix is wide, and no output projection beside it tells how many rows are queries; {_WHOLE}."
        )
    queries = width or columns
    keys, odd = divmod(rows - queries, 2)
    if odd or keys < 1 or queries % keys:
        raise ValueError(
            f"`{parameter}` of shape {(rows, columns)} cannot be split into {count} equal parts, nor into {queries} "
            f"rows of queries and two equal parts of keys and values; {_WHOLE}."
        )
    return [queries, keys, keys]


def _values_last(rows: int, width: int | None, parameter: str, beside: Shapes) -> list[int]:
    keys, odd = divmod(rows - (width or 0), 2)
    if width is None or odd or keys < 1:
        raise ValueError(
            f"`{parameter}` of shape {tuple(beside[parameter])} cannot be cut: no output projection beside it tells "
            f"how many rows are values; {_WHOLE}."
        )
    return [keys, keys, width]


def _equal(rows: int, count: int, parameter: str, beside: Shapes) -> list[int]:
    height, over = divmod(rows, count)
    if over or height < 1:
        raise ValueError(
            f"`{parameter}` of shape {tuple(beside[parameter])} cannot be split into {count} equal parts; {_WHOLE}."
        )
    return [height] * count


def _out_width(parameter: str, beside: Shapes) -> int | None:
    """How many inputs the output projection of the same attention has: as many as there are rows of queries."""
    found = (beside.get(_sibling(parameter, name), ()) for name in OUT_PROJECTIONS)
    return next((shape[1] for shape in found if len(shape) == 2), None)


def _sibling(parameter: str, name: str) -> str:
    """The weight of another part of the same attention."""
    return f"{parameter.removesuffix('.weight').rpartition('.')[0]}.{name}.weight"
