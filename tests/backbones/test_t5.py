"""The T5 backbone: loaded whole or not at all, greedy, never in float16."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file, save_file
from tiny_text import glue, noisy, save_t5, t5, tokenizer, weights, write_glue

from safemerge_pl.backbones.t5 import T5Backbone
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import TaskArithmetic
from safemerge_pl.scoring import FileGauge, Scorer
from safemerge_pl.scoring.drift import gauge_of


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random T5 with its own head, as a folder."""
    return save_t5(t5(), tmp_path_factory.mktemp("t5") / "base")


def test_answers_are_greedy_and_do_not_depend_on_padding_or_generation_config(base: Path, tmp_path: Path) -> None:
    """Whatever generation_config.json says; a prompt alone and one padded in a batch agree."""
    model = noisy(t5(), 3, scale=0.3)
    plain = T5Backbone(str(save_t5(model, tmp_path / "plain")))
    sampled = T5Backbone(str(save_t5(model, tmp_path / "sampled")))
    settings = {"do_sample": True, "temperature": 3.0, "max_length": 3, "num_beams": 4}
    (tmp_path / "sampled" / "generation_config.json").write_text(json.dumps(settings))
    prompts = ["the good film runs", "the " + "bad " * 30 + "dog", "house"]
    answers = []
    for found in (plain, sampled):
        found.load()
        answers.append(found.generate(prompts))
    assert answers[0] == answers[1] == [plain.generate([prompt])[0] for prompt in prompts]
    # a literal greedy loop, one token at a time
    tokens = plain.preprocess(prompts[:1])
    ids = [0]
    with torch.inference_mode():
        while len(ids) < 10 and ids[-1] != 1:
            logits = plain.model(**tokens, decoder_input_ids=torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
    assert answers[0][0] == tokenizer().decode(ids, skip_special_tokens=True)
    assert plain(plain.preprocess(prompts)).shape[1] <= 10


def test_drift_over_words_at_random(base: Path) -> None:
    """None of them is a special token; the features are the logits that an answer begins with."""
    backbone = T5Backbone(str(base))
    backbone.load()
    noise = backbone.noise(5)
    assert noise["input_ids"].shape == (5, 16)
    assert not set(noise["input_ids"].flatten().tolist()) & set(tokenizer().all_special_ids)
    found = backbone.model.generate(**noise, max_length=2, return_dict_in_generate=True, output_logits=True)
    torch.testing.assert_close(backbone.features(noise), found.logits[0], atol=1e-5, rtol=0)
    gauge = gauge_of(backbone, backbone.model, count=5)
    assert gauge is not None
    assert gauge.measure() == 0
    assert gauge.measure(dict(noisy(t5(), 3, scale=0.3).state_dict())) > 0


def test_drift_of_files(base: Path, tmp_path: Path) -> None:
    """With a head of its own that is merged as well; where transformers makes one of two equal ones, it says so."""
    folder = save_t5(noisy(t5(), 1, scale=0.1), tmp_path / "apart")
    files = FileGauge(str(folder))
    files.require_sight(ContinualMerger(folder, TaskArithmetic()).plan)
    backbone = T5Backbone(str(folder))
    backbone.load()
    gauge, changed = gauge_of(backbone, backbone.model), dict(noisy(t5(), 3, scale=0.3).state_dict())
    assert gauge is not None
    assert files(changed) == gauge.measure(changed) > 0
    with pytest.raises(CheckpointError, match=r"not see 1 of the merged parameters, first `lm_head\.weight`"):
        FileGauge(str(base)).require_sight(ContinualMerger(base, TaskArithmetic()).plan)


def test_long_prompts_are_cut(base: Path) -> None:
    found = T5Backbone(str(base), max_input_length=8)
    found.load()
    tokens = found.preprocess(["the film " * 40, "the dog"])
    assert tokens["input_ids"].shape == (2, 8)
    assert tokens["attention_mask"].sum(1).tolist() == [8, 3]
    assert tokens["input_ids"][0, -1] == 1


def test_spec_builds_the_backbone_again() -> None:
    from safemerge_pl.backbones import build_backbone

    again = build_backbone(T5Backbone("a/b", revision="main", max_input_length=64, max_length=5).spec())
    assert isinstance(again, T5Backbone)
    assert again.spec()["init_args"] == {
        "pretrained": "a/b",
        "revision": "main",
        "max_input_length": 64,
        "max_length": 5,
    }


@pytest.mark.parametrize("own_head", [True, False])
def test_head_is_tied_as_the_model_has_it(own_head: bool, tmp_path: Path) -> None:
    """The embedding is one tensor; the head is it or not; logits are those of the model that was saved."""
    model = noisy(t5(own_head=own_head), 5)
    found = T5Backbone(str(save_t5(model, tmp_path / "t5", own_head=own_head)))
    found.load()
    inner = found.model
    assert inner.shared.weight is inner.encoder.embed_tokens.weight is inner.decoder.embed_tokens.weight
    assert (inner.lm_head.weight is inner.shared.weight) != own_head
    assert all(torch.equal(tensor, inner.state_dict()[name]) for name, tensor in weights(model).items())
    inputs = {"input_ids": torch.tensor([[5, 6, 1]]), "decoder_input_ids": torch.tensor([[0, 4]])}
    with torch.inference_mode():
        assert torch.equal(inner(**inputs).logits, model(**inputs).logits)


def test_a_lost_head_is_refused(base: Path, tmp_path: Path) -> None:
    """transformers would tie it in silence."""
    shutil.copytree(base, tmp_path / "t5")
    tensors = load_file(base / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "t5" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks `lm_head.weight`, but its config.json says that the head is not"):
        T5Backbone(str(tmp_path / "t5")).load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no readable config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "has no readable config.json"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "bart"}'),
            "is a model of type bart, not t5",
        ),
        (lambda folder: lose(folder, "decoder.block.0.layer.2.DenseReluDense.wo.weight"), "lacks 1 tensors of a T5"),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{"),
            "is no T5 model that transformers can load|tokenizer",
        ),
    ],
)
def test_folders_that_are_no_t5(change: Any, message: str, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "t5")
    change(tmp_path / "t5")
    with pytest.raises(CheckpointError, match=message):
        T5Backbone(str(tmp_path / "t5")).load()


def lose(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_nothing_is_fetched_in_the_dark() -> None:
    """A hub id that is not in the cache, offline."""
    with pytest.raises(CheckpointError, match="google/flan-t5-base is neither a local path nor a hub model"):
        T5Backbone().load()


def test_float16_is_refused_and_nan_is_no_answer(base: Path, tmp_path: Path, make_trainer: Any) -> None:
    """As weights, as autocast, and under a trainer before the first merge; broken weights are named."""
    found = T5Backbone(str(base))
    found.load()
    inputs = found.preprocess(["the good film"])
    message = "T5 overflows in float16; use precision '32-true' or 'bf16-mixed'"
    with torch.autocast("cpu", torch.float16), pytest.raises(MisconfigurationException, match=message):
        found(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found(inputs)
    data = glue(write_glue(tmp_path, 2, ["cola"]), ["cola"])
    with torch.no_grad():
        found.model.decoder.final_layer_norm.weight[0] = torch.nan
    with pytest.raises(FloatingPointError, match="set 'cola': the logits hold NaN or Inf: a weight is broken"):
        Scorer(found, data).score("cola")
    found.half()
    with pytest.raises(MisconfigurationException, match=message):
        found(inputs)
