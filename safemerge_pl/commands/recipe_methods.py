"""The merge methods of a mergekit recipe, as methods of this package.

The definitions are those of ``merge_methods/linear.py`` and ``generalized_task_arithmetic.py`` of mergekit 0.1.4.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from safemerge_pl import methods
from safemerge_pl.runtime.classes import subclasses
from safemerge_pl.runtime.names import refuse_unknown

__all__ = ["translate_method"]

_WEIGHTED = {"task_arithmetic": False, "ties": True, "linear": True}
"""Methods of mergekit that have a counterpart, and whether the weights are divided by their sum unless told."""

_SHARED = {"normalize", "lambda", "int8_mask", "rescale"}
_OF_A_MODEL = {"weight", "density"}

_TIES = (
    "ties: each model is merged into the merge of those before it, with one threshold for the whole model and a sum "
    "where mergekit merges all at once, tensor by tensor, with a {}; the result is not mergekit's"
)


def translate_method(
    name: str, shared: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]], base: str
) -> tuple[dict[str, Any], str]:
    """A method of this package for one of a recipe.

    Args:
        name: its ``merge_method``.
        shared: parameters of all models.
        models: each model, with its own parameters.
        base: the one that all others were fine-tuned from; it may be among them.

    Returns:
        The method as ``class_path`` and ``init_args``, and a sentence on how it differs from mergekit's, if it does.

    Raises:
        ValueError: naming the method, or the parameter, that there is no counterpart of.

    Example:
        >>> translate_method("linear", {"weight": 1}, {"a": {}, "b": {}}, "base")
        ({'class_path': 'TaskArithmetic', 'init_args': {'scaling': 0.5}}, '')
    """
    if name not in _WEIGHTED:
        return _our_method(name, shared, models), ""
    refuse_unknown(shared, _SHARED | _OF_A_MODEL, f"{name} has no parameter")
    for parameters in models.values():
        refuse_unknown(parameters, _OF_A_MODEL, f"{name} has no parameter of a single model")
    given = {model: {**shared, **parameters} for model, parameters in models.items()}
    if name != "linear":
        given.pop(base, None)  # its task vector is zero; in a mean of models it counts
    factors = _factors(name, shared, given, base)
    same = max(factors) - min(factors) <= 1e-12 * max(map(abs, factors))
    if name != "ties":
        settings = {"scaling": factors[0] if same else factors}
        return {"class_path": "TaskArithmetic", "init_args": settings}, ""
    if shared.get("rescale"):
        raise ValueError("`rescale` has no counterpart: leave it out")
    densities = {_number(parameters, "density", 1.0) for parameters in given.values()}
    if not same or len(densities) > 1:
        what = "density" if same else "weight"
        raise ValueError(f"`{what}` differs between the models, and TiesMerging has one for all: make them the same")
    mean = shared.get("normalize", _WEIGHTED[name])
    note = _TIES.format("weighted mean" if mean else "sum of the weighted vectors")
    return {"class_path": "TiesMerging", "init_args": {"scaling": factors[0], "top_k": densities.pop()}}, note


def _factors(name: str, shared: Mapping[str, Any], given: Mapping[str, Mapping[str, Any]], base: str) -> list[float]:
    """What the task vector of each model is multiplied by: its weight, over their sum if they are normalised."""
    missing = next((model for model, parameters in given.items() if "weight" not in parameters), None)
    if missing is not None:
        raise ValueError(f"`weight` of {missing} is missing")
    weights = {model: _number(parameters, "weight") for model, parameters in given.items()}
    normalize, total = shared.get("normalize", _WEIGHTED[name]), sum(weights.values())
    if name == "linear" and not normalize and abs(total - 1) > 1e-6:
        raise ValueError(f"`weight` sums to {total:g} without `normalize`, which scales the base too: make it 1")
    scale = _number(shared, "lambda", 1.0) / (total if normalize and abs(total) >= 1e-8 else 1.0)
    return [scale * weight for model, weight in weights.items() if model != base]


def _our_method(name: str, settings: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A method of this package by its name, in any spelling: ``safe_merge``, ``SafeMerge``."""
    ours = {kind.__name__: kind for kind in subclasses(methods.MergeMethod) if kind in vars(methods).values()}  # type: ignore[type-abstract]
    plain = name.replace("_", "").replace("-", "").casefold()
    found = next((key for key in ours if key.casefold() == plain), None)
    if found is None:
        raise ValueError(
            f"`merge_method: {name}` is not done here; {', '.join(_WEIGHTED)} are, and {', '.join(ours)}; or choose "
            "on the command line: `--method SafeMerge`"
        )
    refuse_unknown(settings, inspect.signature(ours[found]).parameters, f"{found} has no parameter")
    own = next((model for model, parameters in models.items() if parameters), None)
    if own is not None:
        raise ValueError(f"`{next(iter(models[own]))}` of {own}: {found} has none of a single model; leave it out")
    return {"class_path": found, "init_args": dict(settings)}


def _number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = parameters.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"`{key}` must be a number, got {value!r}")
    return float(value)
