"""Recipes of mergekit: the same numbers where the definitions are the same, and a sentence everywhere else."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from safetensors.torch import load_file
from tiny import Tensors, tower, tuned

from safemerge_pl.cli import main
from safemerge_pl.commands.recipe import read_recipe
from safemerge_pl.errors import CheckpointError

EXPERTS = ("a", "b", "c")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three fine-tunes of it, in one folder."""
    place = tmp_path_factory.mktemp("models")
    tiny.folder_of(place / "base", tower(), config={"model_type": "clip_vision_model"})
    for seed, name in enumerate(EXPERTS, 1):
        tiny.folder_of(place / name, tuned(tower(), seed), config={"model_type": "clip_vision_model"})
    return place


def recipe(*weights: Any, method: str = "task_arithmetic", base: Any = ..., **more: Any) -> dict[str, Any]:
    """A recipe with one weight per expert, and one of the base if it is given."""
    entries = [
        {"model": name, "parameters": {"weight": weight}} for name, weight in zip(EXPERTS, weights, strict=False)
    ]
    if base is not ...:
        entries.insert(0, {"model": "base"} if base is None else {"model": "base", "parameters": {"weight": base}})
    return {"models": entries, "merge_method": method, "base_model": "base"} | more


def mergekit(weights: list[float], *, normalize: bool, scale: float = 1.0, base: float | None = None) -> Tensors:
    """The definitions of ``linear`` (with a weight of the base) and ``task_arithmetic``, as mergekit has them."""
    pretrained = tower()
    experts = [tuned(pretrained, seed) for seed, _ in enumerate(weights, 1)]
    found = {}
    for name, tensor in pretrained.items():
        if not tensor.is_floating_point():
            found[name] = tensor
        elif base is None:
            mixed = sum(weight * (expert[name] - tensor) for weight, expert in zip(weights, experts, strict=True))
            found[name] = tensor + scale * mixed / (sum(weights) if normalize else 1.0)
        else:
            mixed = base * tensor + sum(w * expert[name] for w, expert in zip(weights, experts, strict=True))
            found[name] = mixed / ((base + sum(weights)) if normalize else 1.0)
    return found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (recipe(0.5, 0.5, 0.5), mergekit([0.5, 0.5, 0.5], normalize=False)),
        (recipe(0.7, 0.2, -0.1), mergekit([0.7, 0.2, -0.1], normalize=False)),
        (
            recipe(1.0, 0.5, base=None, parameters={"normalize": True, "lambda": 0.8, "int8_mask": True}),
            mergekit([1.0, 0.5], normalize=True, scale=0.8),
        ),
        (recipe(1.0, 3.0, method="linear", base=2.0), mergekit([1.0, 3.0], normalize=True, base=2.0)),
        (recipe(1, 1, 1, method="linear"), mergekit([1, 1, 1], normalize=True, base=0.0)),
        (
            recipe(0.25, 0.5, method="linear", base=0.25, parameters={"normalize": False}),
            mergekit([0.25, 0.5], normalize=False, base=0.25),
        ),
    ],
)
def test_weighted_sums_are_those_of_mergekit(
    content: dict[str, Any], expected: Tensors, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    file = tmp_path / "recipe.yml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    main(["fold", "--config", str(file), "--output", str(tmp_path / "out")])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)


def read(content: Any, folder: Path, **options: Any) -> Any:
    file = folder / "recipe.yml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return read_recipe(file, **options)


def test_what_a_recipe_asks_for(tmp_path: Path) -> None:
    """Order, adapters of the base, revisions, dtype, and the base among the models."""
    content = recipe(base=None, dtype="bfloat16", out_dtype="torch.float16", tokenizer_source="base")
    content["base_model"] = {"model": {"path": "base", "revision": "v2"}}
    content["models"][0]["model"] = "base@v2"
    content["models"] += [{"model": name, "parameters": {"weight": 0.5}} for name in ("b", "base@v2+adapter", "own/a")]
    options, notes = read(content, tmp_path)
    assert options == {
        "pretrained": "base@v2",
        "incoming": ["b", "adapter", "own/a"],
        "dtype": "float16",
        "method": {"class_path": "TaskArithmetic", "init_args": {"scaling": 0.5}},
    }
    assert notes == []


def test_ties_is_ours_and_says_so(tmp_path: Path) -> None:
    content = recipe(0.5, 0.5, method="ties", parameters={"density": 0.3})
    options, (note,) = read(content, tmp_path)
    assert options["method"] == {"class_path": "TiesMerging", "init_args": {"scaling": 0.5, "top_k": 0.3}}
    assert "the result is not mergekit's" in note
    assert "weighted mean" in note
    options, (note,) = read(content | {"parameters": {"density": 1, "lambda": 0.5, "normalize": False}}, tmp_path)
    assert options["method"]["init_args"] == {"scaling": 0.25, "top_k": 1.0}
    assert "sum of the weighted vectors" in note


def test_one_line_of_a_recipe_tries_our_methods(models: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(models)
    content = {"models": [{"model": "a"}, {"model": "b"}], "base_model": "base", "merge_method": "safe_merge"}
    options, _ = read(content | {"parameters": {"keep_ratio": 0.3}}, tmp_path)
    assert options["method"] == {"class_path": "SafeMerge", "init_args": {"keep_ratio": 0.3}}
    (tmp_path / "slerp.yml").write_text(yaml.safe_dump(recipe([0, 1], method="slerp", dtype="bfloat16")))
    main(["fold", "--config", str(tmp_path / "slerp.yml"), "--output", str(tmp_path / "out"), "--method", "OPCM"])
    shown = capsys.readouterr().out
    assert "note: the recipe's method and parameters give way to --method" in shown
    assert "OPCM: folded 'a' as task 1" in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": None}, "`models` must be a list"),
        ({"slices": [{"sources": []}]}, "`slices` puts layers of several models together, .* list them under `models`"),
        ({"modules": {"text": {}}}, "`modules` merges the parts of a model differently"),
        ({"chat_template": "auto"}, "`chat_template` changes the tokenizer"),
        ({"merge_methods": "ties"}, "there is no key 'merge_methods'; did you mean 'merge_method'"),
        ({"base_model": None}, "`base_model` is missing: name the pretrained model"),
        ({"models": [{"model": "base"}]}, "names no model but the base"),
        ({"models": [{"model": "other+adapter"}]}, "puts an adapter on another model than the base"),
        ({"models": [{"model": "a"}, {"model": "a"}]}, "a is listed twice"),
        ({"models": [{"model": "a"}]}, "`weight` of a is missing"),
        ({"models": [{"model": "a", "parameters": {"weight": [0, 1]}}]}, "`weight` of a changes from layer to layer"),
        ({"models": [{"model": "a", "weight": 1}]}, "a model has no key 'weight'"),
        ({"parameters": {"weight": [{"filter": "mlp", "value": 1}]}}, "`weight` of all models changes from layer"),
        ({"parameters": {"lamda": 1}}, "task_arithmetic has no parameter 'lamda'; did you mean 'lambda'"),
        ({"merge_method": "dare_ties"}, "`merge_method: dare_ties` is not done here; task_arithmetic, ties, linear"),
        ({"merge_method": "ties", "models": [{"model": "a", "parameters": {"weight": "x"}}]}, "`weight` must be a num"),
        ({"merge_method": "opcm"}, "`weight` of a: OPCM has none of a single model"),
        ({"merge_method": "opcm", "parameters": {"alfa": 0.5}}, "OPCM has no parameter 'alfa'; did you mean 'alpha'"),
        ({"merge_method": "linear", "parameters": {"normalize": False}}, "sums to 0.9 without `normalize`"),
        ({"merge_method": "ties"}, "`weight` differs between the models, and TiesMerging has one"),
        ({"tokenizer_source": "union"}, "a tokenizer from 'union' changes the vocabulary"),
        ({"tokenizer": {"source": "base", "pad_to_multiple_of": 8}}, "`pad_to_multiple_of` changes the vocabulary"),
        ({"dtype": "float8"}, "there is no `dtype` 'float8'"),
    ],
)
def test_what_is_not_done_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    content = recipe(0.7, 0.2) | change
    with pytest.raises(CheckpointError, match=message) as caught:
        read(content, tmp_path)
    assert str(caught.value).startswith(f"the recipe {tmp_path / 'recipe.yml'}: ")
    assert "\n" not in str(caught.value)


def test_what_is_no_recipe_is_left_alone(tmp_path: Path) -> None:
    assert read({"pretrained": "base", "incoming": "a", "output": "out"}, tmp_path) is None
    assert read("- a\n- b\n", tmp_path) is None
    assert read("a: [\n", tmp_path) is None
    assert read_recipe("quick" * 100) is None
    assert read_recipe("{pretrained: base}") is None
    with pytest.raises(CheckpointError, match="it holds 2 recipes"):
        read("merge_method: ties\n---\nmerge_method: linear\n", tmp_path)
