"""Weights that a module computes from other tensors: refused before anything is merged, or none of our business."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import tiny
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from loops import Classifier, Tasks, encoder, live
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from safemerge_pl import LiveMerger, TaskArithmetic
from safemerge_pl.callbacks import SAFEMergeCallback
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.folding.reparametrised import computed_weights

Make = Callable[..., Any]
Change = Callable[[nn.Module], Any]


class Halves(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


CHANGES: dict[str, Change] = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "prune rows": lambda layer: prune.ln_structured(layer, "weight", 0.5, n=2, dim=0),
    "prune globally": lambda layer: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=0.5),
    "prune twice": lambda layer: prune.random_unstructured(prune.identity(layer, "weight"), "weight", 0.5),
    "parametrize": lambda layer: parametrize.register_parametrization(layer, "weight", Halves()),
    "orthogonal": parametrizations.orthogonal,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": weight_norm,
    "old spectral_norm": spectral_norm,
}
WORDS = {"prune": "is pruned .*prune.remove", "old": "is normalised .*remove_", "": "is parametrised .*remove_param"}
pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")


def words(name: str) -> str:
    return next(text for key, text in WORDS.items() if name.startswith(key))


def fc1(module: nn.Module) -> nn.Module:
    found: nn.Module = module.get_submodule("blocks.0.mlp.fc1")
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_a_computed_weight_that_would_be_merged_is_refused(name: str) -> None:
    module = tiny.timm_vit()
    CHANGES[name](fc1(module))
    assert list(computed_weights(module)) == ["blocks.0.mlp.fc1.weight"]
    with pytest.raises(CheckpointError, match=rf"`blocks\.0\.mlp\.fc1\.weight` {words(name)}"):
        LiveMerger(module, tiny.fast_method())
    with pytest.raises(CheckpointError, match=words(name)):
        LiveMerger(module, tiny.fast_method(), layers=["blocks.0.mlp.*"])


@pytest.mark.parametrize("name", CHANGES)
def test_computed_since_the_merge_began(name: str) -> None:
    """Neither read nor written; the merge and the other weights stay."""
    module = tiny.timm_vit()
    merger = LiveMerger(module, tiny.fast_method())
    with torch.no_grad():
        module.blocks[1].mlp.fc1.weight.add_(0.1)  # type: ignore[union-attr,index,operator]
    merger.fold_trained("a")
    merger.restart()
    CHANGES[name](fc1(module))
    before = tiny.copied(module.state_dict())
    for act in (
        merger.restart,
        merger.apply_merged,
        lambda: merger.fold_trained("b"),
        lambda: merger.fold(before, "b"),
    ):
        with pytest.raises(CheckpointError, match=rf"{words(name).partition(' .*')[0]} .*since the merge began"):
            act()
    assert merger.tasks == ["a"]
    tiny.assert_same(tiny.copied(module.state_dict()), before)


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_merged_may_be_computed(name: str) -> None:
    """A weight-normed head, as DINO has it; it goes back to what it was, like all else."""
    module = nn.ModuleDict({"body": tiny.timm_vit(), "head": nn.Linear(4, 4)})
    CHANGES[name](module["head"])
    theta0 = tiny.copied(module.state_dict())
    merger = LiveMerger(module, tiny.fast_method())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.01)
    merger.fold_trained("a")
    held = tiny.copied(module.state_dict())
    merged = merger.merged_parameters()
    assert all(torch.equal(tensor, merged.get(key, theta0[key])) for key, tensor in held.items())


def test_methods_that_merge_everything_refuse_masks_too() -> None:
    module = nn.ModuleDict({"body": tiny.timm_vit(), "head": nn.Linear(4, 4)})
    prune.l1_unstructured(module["head"], "weight", 0.5)
    with pytest.raises(CheckpointError, match=r"`head\.weight` is pruned"):
        LiveMerger(module, TaskArithmetic())


def test_pruning_that_was_made_permanent_is_none() -> None:
    module = tiny.timm_vit()
    prune.l1_unstructured(fc1(module), "weight", 0.5)
    prune.remove(fc1(module), "weight")
    assert not computed_weights(module)
    LiveMerger(module, tiny.fast_method())


def test_adapters_around_a_pruned_weight() -> None:
    peft = pytest.importorskip("peft")
    module = tiny.timm_vit()
    prune.l1_unstructured(fc1(module), "weight", 0.5)
    adapted = peft.get_peft_model(module, peft.LoraConfig(target_modules=["qkv"], r=2))
    with pytest.raises(CheckpointError, match=r"`blocks\.0\.mlp\.fc1\.weight` is pruned"):
        LiveMerger(adapted, tiny.fast_method())


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.parametrize("files", [False, True], ids=["training", "files"])
@pytest.mark.parametrize("name", ["prune", "parametrize", "old weight_norm"])
def test_the_callback_refuses_it_before_the_first_step(name: str, files: bool, make_trainer: Make) -> None:
    module = Classifier()
    experts = {"a": encoder(module)}
    CHANGES[name](fc1(module.encoder))
    merge: L.Callback = (
        SAFEMergeCallback(experts=experts, module_attr="encoder") if files else live()  # type: ignore[arg-type]
    )
    trainer = make_trainer(merge, max_epochs=1 if files else 2)
    with pytest.raises(MisconfigurationException, match=words(name)):
        trainer.fit(module, Tasks())
    assert not trainer.global_step
