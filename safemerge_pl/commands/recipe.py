"""Read a recipe of mergekit as the options of a fold.

What a recipe says is done as mergekit 0.1.4 defines it, or a note says where the method here differs, or it is refused
with its name and the way out.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml

from safemerge_pl.commands.recipe_methods import translate_method
from safemerge_pl.errors import CheckpointError
from safemerge_pl.output.side_files import OutputDtype
from safemerge_pl.runtime.names import did_you_mean, refuse_unknown

__all__ = ["Recipe", "read_recipe", "read_recipes"]

_KEYS = (
    "base_model",
    "models",
    "merge_method",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer",
    "tokenizer_source",
    "name",
)

_ELSEWHERE = {
    "slices": "puts layers of several models together, and a fold merges whole models: list them under `models`",
    "modules": "merges the parts of a model differently: merge the model as a whole, with `models`",
    "chat_template": "changes the tokenizer, and a merge keeps that of the base: leave it out",
}


class Recipe(NamedTuple):
    """What a recipe asks for.

    Attributes:
        options: of :func:`safemerge_pl.commands.fold.fold_once`, as plain values.
        notes: where the result is not that of mergekit, a sentence each.
    """

    options: dict[str, Any]
    notes: list[str]


def read_recipes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace recipes of mergekit among the configurations of a command line by the options that they stand for.

    Args:
        arguments: those of ``safemerge fold``. A ``--method`` among them takes the place of the recipe's.

    Returns:
        The arguments, and the notes of the recipes.

    Raises:
        CheckpointError: for a recipe that asks for what a fold does not do.
    """
    found, notes = list(arguments), []
    own_method = any(argument.partition("=")[0] == "--method" for argument in arguments)
    for place, argument in enumerate(found):
        option, equals, path = argument.partition("=")
        if option not in ("--config", "-c"):
            continue
        if not equals:
            place, path = place + 1, found[place + 1] if place + 1 < len(found) else ""
        recipe = read_recipe(path, own_method=own_method)
        if recipe is not None:
            found[place] = f"{option}=" * bool(equals) + json.dumps(recipe.options)
            notes += recipe.notes
    return found, notes


def read_recipe(path: str | Path, *, own_method: bool = False) -> Recipe | None:
    """Read a file that may be a recipe of mergekit.

    Args:
        path: a YAML file; paths in it are relative to the current folder, as they are for mergekit.
        own_method: the method is given elsewhere, so that of the recipe does not matter.

    Returns:
        What it asks for; ``None`` for what is no file, or has no ``merge_method``.

    Raises:
        CheckpointError: naming the part of the recipe that a fold does not do, and what to do instead.
    """
    if not os.path.isfile(path):  # also false for a whole configuration in place of its name
        return None
    try:
        parts = [part for part in yaml.safe_load_all(Path(path).read_text(encoding="utf-8")) if part is not None]
    except (yaml.YAMLError, UnicodeDecodeError):
        return None  # the parser of configurations says what is wrong with it
    if not any(isinstance(part, dict) and "merge_method" in part for part in parts):
        return None
    try:
        if len(parts) > 1:
            raise ValueError(f"it holds {len(parts)} recipes; give one file for each, and fold one after another")
        return _translate(parts[0], own_method)
    except ValueError as error:
        raise CheckpointError(f"the recipe {path}: {str(error).rstrip('.')}.") from error


def _translate(recipe: Mapping[str, Any], own_method: bool) -> Recipe:
    for key, why in _ELSEWHERE.items():
        if recipe.get(key) is not None:
            raise ValueError(f"`{key}` {why}")
    refuse_unknown(recipe, _KEYS, "there is no key")
    base = _name_model(recipe.get("base_model"), "base_model")
    if not base:
        raise ValueError("`base_model` is missing: name the pretrained model that all others were fine-tuned from")
    _require_base_tokenizer(recipe)
    entries = _read_entries(recipe.get("models"), base)
    options: dict[str, Any] = {
        "pretrained": base,
        "incoming": [model for model in entries if model != base],
        "dtype": _read_dtype(recipe),
    }
    if not options["incoming"]:
        raise ValueError("`models` names no model but the base: list those that were fine-tuned from it")
    if own_method:
        return Recipe(options, ["the recipe's method and parameters give way to --method"])
    name, shared = str(recipe["merge_method"]), _read_parameters(recipe.get("parameters"), "all models")
    models = {model: _read_parameters(parameters, model) for model, parameters in entries.items()}
    method, note = translate_method(name, shared, models, base)
    return Recipe(options | {"method": method}, [note] if note else [])


def _read_entries(models: Any, base: str) -> dict[str, Any]:
    """Each model in the order of the recipe, with what it says of its own parameters."""
    if not isinstance(models, list) or not all(isinstance(entry, dict) and "model" in entry for entry in models):
        raise ValueError("`models` must be a list with a `model` in each entry")
    found: dict[str, Any] = {}
    for entry in models:
        refuse_unknown(entry, ("model", "parameters"), "a model has no key")
        name = _name_model(entry["model"], "model")
        under, plus, adapter = name.partition("+")
        if plus and under != base:
            raise ValueError(f"{name} puts an adapter on another model than the base: merge these two first, with peft")
        name = adapter if plus else name
        if name in found:
            raise ValueError(f"{name} is listed twice: give it once, with the sum of its weights")
        found[name] = entry.get("parameters")
    return found


def _name_model(given: Any, key: str) -> str:
    """A model as ``path``, ``path@revision`` or ``path+adapter``, from any form that mergekit takes."""
    if isinstance(given, dict) and given.keys() <= {"model", "lora"} and "model" in given:
        adapter = _name_model(given["lora"], "lora") if given.get("lora") else ""
        return _name_model(given["model"], key) + (f"+{adapter}" if adapter else "")
    if isinstance(given, dict) and given.keys() <= {"path", "revision"} and "path" in given:
        return str(given["path"]) + (f"@{given['revision']}" if given.get("revision") else "")
    if given is not None and not isinstance(given, str):
        raise ValueError(f"`{key}` must name a model, got {given!r}")
    return given or ""


def _read_parameters(given: Any, of: str) -> dict[str, Any]:
    """Parameters of a model or of all; those that change from layer to layer are refused."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f"`parameters` of {of} must be names and values, got {given!r}")
    for key, value in given.items():
        if isinstance(value, (list, dict)):
            raise ValueError(f"`{key}` of {of} changes from layer to layer, and a fold has one for all: give a number")
    return dict(given)


def _require_base_tokenizer(recipe: Mapping[str, Any]) -> None:
    """Refuse to change the vocabulary."""
    tokenizer = recipe.get("tokenizer")
    source = tokenizer if isinstance(tokenizer, dict) else {"source": recipe.get("tokenizer_source")}
    named = source.get("source", "union")
    if named not in (None, "base", _name_model(recipe.get("base_model"), "base_model")):
        raise ValueError(f"a tokenizer from '{named}' changes the vocabulary, which stays the base's: write `base`")
    more = next((key for key, value in source.items() if key != "source" and value), None)
    if more is not None:
        raise ValueError(f"`{more}` changes the vocabulary, which stays the base's: leave it out")


def _read_dtype(recipe: Mapping[str, Any]) -> str:
    """Of the written weights; the arithmetic is in float32 whatever a recipe says."""
    given = str(recipe.get("out_dtype") or recipe.get("dtype") or "same").removeprefix("torch.")
    if given not in get_args(OutputDtype):
        raise ValueError(f"there is no `dtype` '{given}'; {did_you_mean(given, get_args(OutputDtype))}")
    return given
