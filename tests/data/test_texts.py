"""Text sets and their scores, the T5 backbone, and GLUE's files: what is read, what is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file, save_file
from small import SmallZoo
from tiny_text import ABOUT, examples, glue, noisy, save_t5, t5, table, tokenizer, weights, write_glue
from torch import Tensor, nn

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.backbones.t5 import T5Backbone
from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.data.glue import GLUEData
from safemerge_pl.data.texts import ExactMatchScore, SpearmanScore, TextSet
from safemerge_pl.functional import summarise
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import TaskArithmetic
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.scoring import Scorer, expert_weights, swapped_weights
from safemerge_pl.scoring.rows import require_published


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random T5 with its own head, as a folder."""
    return save_t5(t5(), tmp_path_factory.mktemp("t5") / "base")


@pytest.fixture(scope="module")
def backbone(base: Path) -> T5Backbone:
    found = T5Backbone(str(base))
    found.load()
    return found


# what the paper's pipeline asks and expects

PROMPTS = {
    "cola": ("Indicate if the following sentence is grammatically correct or not: \"a {b}\". "
             "Answere 'acceptable' or 'unacceptable'.", ["unacceptable", "acceptable"]),
    "mnli": ("Does the premise: 'a {b}' logically imply, contradict, or is neutral to the hypothesis: 'c'? Answere "
             "with 'entailment', 'contradiction', or 'neutral'.", ["entailment", "neutral", "contradiction"]),
    "mrpc": ("Are the following sentences 'a {b}' and 'c' conveying the same meaning? Answere with 'yes' or 'no'.",
             ["no", "yes"]),
    "qnli": ("Given the context: 'c', does the question 'a {b}' have an answer based on the information provided? "
             "Answer with 'yes' or 'no'.", ["yes", "no"]),
    "qqp": ("Do the questions 'a {b}' and 'c' have the same intent? Answere with 'yes' or 'no'.", ["no", "yes"]),
    "rte": ("Does the text: 'a {b}' entail that 'c' is true? Provide 'yes' or 'no'.", ["yes", "no"]),
    "sst2": ("Given the sentence 'a {b}', determine the sentiment. Is it positive or negative?",
             ["negative", "positive"]),
}  # fmt: skip
COLUMNS = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "mrpc": ("sentence1", "sentence2"),
    "rte": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_and_answers_are_those_of_the_published_experts(name: str, tmp_path: Path) -> None:
    """METHODS 14, to the letter, typos included; braces in a text are plain text."""
    prompt, answers = PROMPTS[name]
    texts = dict(zip(COLUMNS[name], ("a {b}", "c"), strict=False))
    rows = [{**texts, "label": label, "idx": label} for label in range(len(answers))]
    (tmp_path / name).mkdir()
    table(name, rows).to_parquet(tmp_path / name / f"{ABOUT[name]['split']}-00000-of-00001.parquet")
    assert glue(tmp_path, [name]).load_set(name).prompts(range(len(rows))) == ([prompt] * len(rows), answers)


def test_stsb_asks_for_one_decimal_of_the_stored_score(tmp_path: Path) -> None:
    """METHODS 14: the gold answer is the one-decimal string, not the raw score."""
    rows = [{"sentence1": "a", "sentence2": "b", "label": label, "idx": 0} for label in (3.8, 4.75, 0.0, 2.25)]
    (tmp_path / "stsb").mkdir()
    table("stsb", rows).to_parquet(tmp_path / "stsb" / "validation-00000-of-00001.parquet")
    found = glue(tmp_path, ["stsb"]).load_set("stsb")
    assert found.metric == "spearman"
    prompts, answers = found.prompts(range(4))
    assert answers == ["3.8", "4.8", "0.0", "2.2"]
    assert prompts[0] == (
        "Consider the sentences 'a' and 'b'. On a scale from 1 (completely different) to 5 (completely similar), rate "
        "the similarity."
    )


def test_default_stream_and_published_scores() -> None:
    """METHODS 14: order, splits, reference numbers; their means are the paper's rows."""
    data = GLUEData()
    assert data.stream.names == ("cola", "mrpc", "qqp", "sst2", "stsb")
    assert data.controls == ("mnli", "qnli", "rte")
    assert {name for name in ABOUT if ABOUT[name]["split"] != "validation"} == {"mnli"}
    published = data.expected["pretrained"]
    row = summarise([published[name] for name in data.stream], [published[name] for name in data.controls])
    assert {key: round(100 * value, 1) for key, value in row.items()} == {"ACC": 76.2, "Gen": 75.0, "H": 75.6}
    own = data.expected["individual"]
    assert round(100 * sum(own.values()) / len(own), 1) == 86.0
    assert GLUEData(max_rows=8).expected == {}
    # every score of an exact match is a whole number of answers out of the split's size
    sizes = {"cola": 1043, "mnli": 9815, "mrpc": 408, "qnli": 5463, "qqp": 40430, "rte": 277, "sst2": 872}
    for name, size in sizes.items():
        assert abs(published[name] * size - round(published[name] * size)) < 1e-3, name


# scores


class Says(T5Backbone):
    """Answers from a list, in order."""

    def __init__(self, answers: list[str]) -> None:
        super().__init__("nowhere")
        self.answers = answers
        self.weight = nn.Parameter(torch.zeros(1))

    def preprocess(self, examples: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(len(examples))}

    def forward(self, inputs: Any) -> torch.Tensor:
        return inputs["input_ids"]  # type: ignore[no-any-return]

    def decode(self, tokens: Any) -> list[str]:
        taken, self.answers = self.answers[: len(tokens)], self.answers[len(tokens) :]
        return taken

    def written(self, answers: Any) -> list[str]:
        return list(answers)


def rows_of(labels: list[float]) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"text": ["x"] * len(labels), "label": labels})


def scored(said: list[str], labels: list[Any], **settings: Any) -> tuple[float, int]:
    texts = TextSet("a", rows_of(labels), "{text}", **settings)
    backbone = Says(said)
    score, batches = texts.score(backbone), texts.batches(backbone)
    counts = score.zero()
    for start in range(0, len(labels), 2):
        counts = counts + score.count(batches.__getitems__(list(range(start, min(start + 2, len(labels))))))
    return score.value(counts)


def test_exact_match_is_to_the_letter() -> None:
    """METHODS 14: case counts, spaces count, nothing is trimmed."""
    answers = ["yes", "Yes", "yes ", "no", "", "yes"]
    assert scored(answers, [1, 1, 1, 1, 1, 0], answers=("no", "yes")) == (1 / 6, 6)


def plain_spearman(left: list[float], right: list[float]) -> float:
    """Pearson's correlation of the mean ranks, worked out in plain Python."""

    def ranks(values: list[float]) -> list[float]:
        return [(sum(w < v for w in values) + sum(w <= v for w in values) + 1) / 2 for v in values]

    a, b = ranks(left), ranks(right)
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    top = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return float(top / (sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)) ** 0.5)


@pytest.mark.parametrize(
    ("answers", "read"),
    [
        (["1.0", "2.0", "3.5", "3.5", "5.0"], [1, 2, 3.5, 3.5, 5]),
        (["5.0", "4", " 3.0", "1e0", "0.2"], [5, 4, 3, 1, 0.2]),
        (["4.0", "what", "2.0", "", "nan"], [4, 0, 2, 0, 0]),
        (["inf", "1.0", "2.0", "-inf", "3.0"], [0, 1, 2, 0, 3]),
    ],
)
def test_spearman_of_what_is_written(answers: list[str], read: list[float]) -> None:
    """METHODS 14: ties share their mean rank; what is no finite number counts as 0."""
    labels = [0.0, 1.04, 2.6, 2.62, 4.4]  # to one decimal: 2.6 twice
    expected = plain_spearman(read, [0.0, 1.0, 2.6, 2.6, 4.4])
    value, counted = scored(answers, labels, metric="spearman")
    assert (round(value, 5), counted) == (round(expected, 5), 5)


@pytest.mark.parametrize(
    ("answers", "labels"),
    [
        (["3.0"] * 4, [1.0, 2.0, 3.0, 4.0]),
        (["no"] * 4, [1.0, 2.0, 3.0, 4.0]),
        (["1.0", "2.0"], [3.0, 3.0]),
        (["1"], [1.0]),
    ],
)
def test_an_undefined_correlation_is_zero(answers: list[str], labels: list[float]) -> None:
    """K9: constant answers, constant labels, one example: 0, never NaN."""
    assert scored(answers, labels, metric="spearman") == (0.0, len(labels))


def test_counts_of_two_processes_add_up_to_those_of_one() -> None:
    """J3, J4: each example in a place of its own; a process without any adds zeros."""
    labels, answers = [0.0, 1.0, 2.0, 3.0, 4.0], ["0.5", "0.1", "3.0", "2.0", "5.0"]
    texts = TextSet("a", rows_of(labels), "{text}", metric="spearman")
    total = SpearmanScore(texts, Says([])).zero()
    for shard in ([0, 2, 4], [1, 3], []):
        backbone = Says([answers[index] for index in shard])
        if shard:
            total = total + texts.score(backbone).count(texts.batches(backbone).__getitems__(shard))
    whole = scored(answers, labels, metric="spearman")
    assert texts.score(Says([])).value(total) == whole
    assert whole[0] == pytest.approx(plain_spearman([float(a) for a in answers], labels), abs=1e-5)


def test_kinds_that_do_not_fit_are_told_apart(tmp_path: Path, backbone: T5Backbone, make_trainer: Any) -> None:
    data = glue(write_glue(tmp_path, 2, ["cola"]), ["cola"])
    with pytest.raises(
        MisconfigurationException, match="CLIPBackbone writes no text; score text sets with a T5Backbone"
    ):
        make_trainer().validate(ContinualMergeModule(), data, verbose=False)
    with pytest.raises(MisconfigurationException, match="T5Backbone has no zero-shot heads"):
        make_trainer().validate(ContinualMergeModule(backbone), SmallZoo(["mnist"], []), verbose=False)


# the T5 backbone


def test_answers_are_greedy_and_do_not_depend_on_padding_or_generation_config(base: Path, tmp_path: Path) -> None:
    """METHODS 14, N6: whatever generation_config.json says; a prompt alone and one padded in a batch agree."""
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


def test_long_prompts_are_cut(base: Path) -> None:
    found = T5Backbone(str(base), max_input_length=8)
    found.load()
    tokens = found.preprocess(["the film " * 40, "the dog"])
    assert tokens["input_ids"].shape == (2, 8)
    assert tokens["attention_mask"].sum(1).tolist() == [8, 3]
    assert tokens["input_ids"][0, -1] == 1


def test_spec_builds_the_backbone_again() -> None:
    """I11."""
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
    """B1, B7: the embedding is one tensor; the head is it or not; logits are those of the model that was saved."""
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
    """B1, B7: transformers would tie it in silence."""
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
    """N1: a hub id that is not in the cache, offline."""
    with pytest.raises(CheckpointError, match="google/flan-t5-base is neither a local path nor a hub model"):
        T5Backbone().load()


def test_float16_is_refused_and_nan_is_no_answer(base: Path, tmp_path: Path, make_trainer: Any) -> None:
    """A14: as weights, as autocast, and under a trainer before the first merge; broken weights are named."""
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


# experts with other ties

SHARED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def test_a_tied_tensor_is_read_under_any_of_its_names_and_put_in_once(base: Path, tmp_path: Path) -> None:
    """B1, B5: files keep one name of a tied tensor, which one depends on who wrote them."""
    model = t5()
    tuned = weights(noisy(model, 1))
    embedding = tuned["shared.weight"]
    for kept in SHARED:
        file = {name: tensor for name, tensor in tuned.items() if name == kept or name not in SHARED}
        found = expert_weights(model, file)
        with swapped_weights(model, found):
            assert torch.equal(model.shared.weight, embedding)  # type: ignore[union-attr]
            assert all(torch.equal(tensor, tuned[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.shared.weight, t5().shared.weight)  # type: ignore[union-attr]
    lacking = {name: tensor for name, tensor in tuned.items() if "embed" not in name and name != "shared.weight"}
    with pytest.raises(CheckpointError, match=r"lacks \d+ of \d+ tensors to merge, first `shared.weight`"):
        expert_weights(model, lacking)


@pytest.mark.parametrize("theirs", SHARED)
@pytest.mark.parametrize("ours", SHARED)
def test_a_shared_embedding_is_merged_under_any_of_its_names(ours: str, theirs: str) -> None:
    """B1: of the pretrained and of the incoming model."""
    pretrained, tuned = weights(t5()), weights(noisy(t5(), 1))

    def file(tensors: dict[str, Tensor], kept: str) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name == kept or name not in SHARED}

    merger = ContinualMerger(file(pretrained, ours), TaskArithmetic(scaling=1.0))
    merger.fold({f"module.{name}": tensor for name, tensor in file(tuned, theirs).items()}, "one")
    torch.testing.assert_close(merger.merged[ours], tuned["shared.weight"])


def test_an_expert_that_untied_its_head_is_refused(tmp_path: Path) -> None:
    """B2: a head that the pretrained model does not have must not be lost in silence."""
    tied, untied = t5(own_head=False), weights(noisy(t5(), 1))
    with pytest.raises(CheckpointError, match=r"`lm_head.weight` differs from `shared.weight`, which the pretrained"):
        expert_weights(tied, untied)
    with pytest.raises(CheckpointError, match=r"lacks 1 of \d+ tensors to merge, first `lm_head.weight`"):
        expert_weights(t5(), {name: tensor for name, tensor in untied.items() if name != "lm_head.weight"})


# GLUE's files


@pytest.mark.parametrize("layout", ["hub", "one parquet", "shards", "jsonl", "saved"])
def test_layouts_that_are_read(layout: str, tmp_path: Path) -> None:
    rows = examples("mnli", 5, 1)
    found, place = table("mnli", rows), tmp_path / "mnli"
    place.mkdir()
    if layout == "hub":
        write_glue(tmp_path, 5, ["mnli"], seed=1)
    elif layout == "one parquet":
        found.to_parquet(place / "validation_matched.parquet")
    elif layout == "shards":
        found.select(range(3)).to_parquet(place / "validation_matched-00000-of-00002.parquet")
        found.select(range(3, 5)).to_parquet(place / "validation_matched-00001-of-00002.parquet")
        found.select(range(1)).to_parquet(place / "validation_mismatched-00000-of-00001.parquet")
    elif layout == "jsonl":
        lines = [json.dumps(row) for row in rows]
        (place / "validation_matched.jsonl").write_text("\n".join(lines) + "\n\n")
    else:
        import datasets

        datasets.DatasetDict({"validation_matched": found}).save_to_disk(str(place))
    texts = glue(tmp_path, ["mnli"]).load_set("mnli")
    assert [(row["premise"], row["label"]) for row in texts.rows] == [(row["premise"], row["label"]) for row in rows]
    assert len(glue(tmp_path, ["mnli"], max_rows=2).load_set("mnli")) == 2


def test_hub_cache_is_read_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N1, N2: by branch name, offline; a file that is not in the cached snapshot is named."""
    import huggingface_hub

    store = tmp_path / "datasets--nyu-mll--glue"
    write_glue(store / "snapshots" / "0123abcd", 4, ["cola"])
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("0123abcd")
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: real(*a, **{**k, "cache_dir": str(tmp_path)})
    )
    data = GLUEData(["cola", "sst2"], [])
    assert len(data.load_set("cola")) == 4
    with pytest.raises(ValueError, match=r"0123abcd/sst2 has no split 'validation' \(no such folder\)"):
        data.load_set("sst2")
    with pytest.raises(
        ValueError, match=r"cola of a/b is not in the local cache and cannot be fetched .*give `folder`"
    ):
        GLUEData(["cola"], [], dataset="a/b").load_set("cola")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("cola", lambda rows: [row | {"label": -1} for row in rows], "the label -1, as the test split has"),
        ("stsb", lambda rows: [row | {"label": -1.0} for row in rows], "the label -1, as the test split has"),
        ("cola", lambda rows: [row | {"label": 2} for row in rows], "the label 2, but only 0 to 1 have an answer"),
        ("cola", lambda rows: [row | {"label": "good"} for row in rows], "the label 'good', but only 0 to 1"),
        ("stsb", lambda rows: [row | {"label": float("nan")} for row in rows], "the label nan where a number"),
        ("cola", lambda rows: [{"text": "a", "label": 0}], "no column 'sentence' but text, label"),
        ("rte", lambda rows: [{"sentence1": "a", "sentence2": "b"}], "no column 'label' but sentence1, sentence2"),
        ("rte", lambda rows: [row | {"sentence2": None} for row in rows], "'sentence2' holds None where a text"),
    ],
)
def test_tables_that_are_no_glue(name: str, change: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    lines = [json.dumps(row) for row in change(examples(name, 2, 1))]
    (tmp_path / name / "validation.jsonl").write_text("\n".join(lines))
    place = re.escape(str(tmp_path / name))
    with pytest.raises(ValueError, match=f"{place}, split 'validation': .*{message}"):
        glue(tmp_path, [name]).load_set(name)


def test_labels_in_another_order_are_refused(tmp_path: Path) -> None:
    """The same numbers would mean the opposite."""
    from datasets import ClassLabel

    (tmp_path / "rte").mkdir()
    found = table("rte", examples("rte", 3, 1)).cast_column("label", ClassLabel(names=["not_entailment", "entailment"]))
    found.to_parquet(tmp_path / "rte" / "validation.parquet")
    with pytest.raises(
        ValueError, match="labels are not_entailment, entailment, GLUE's are entailment, not_entailment"
    ):
        glue(tmp_path, ["rte"]).load_set("rte")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda place: None, r"has no split 'validation' \(no such folder\)"),
        (
            lambda place: (place.mkdir(), (place / "dev.tsv").touch()),
            r"has no split 'validation' \(dev.tsv\); expected",
        ),
        (lambda place: (place.mkdir(), (place / "validation.parquet").write_text("x")), "cannot be read"),
        (lambda place: (place.mkdir(), (place / "validation.jsonl").write_text("{")), "cannot be read"),
        (lambda place: (place.mkdir(), (place / "validation.jsonl").touch()), "is empty|no column"),
    ],
)
def test_files_that_are_missing_or_broken(prepare: Any, message: str, tmp_path: Path) -> None:
    prepare(tmp_path / "cola")
    with pytest.raises(ValueError, match=message):
        glue(tmp_path, ["cola"]).load_set("cola")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ["wnli"]}, "GLUE has no set 'wnli' here; there are cola, mnli"),
        ({"controls": ["ax"]}, "GLUE has no set 'ax' here"),
        ({"max_rows": 0}, "`max_rows` must be at least 1, got 0"),
        ({"tasks": ["cola", "cola"]}, "distinct names, got cola more than once"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GLUEData(**settings)


# published scores


def test_scores_off_the_published_ones_stop_the_run() -> None:
    data = GLUEData()
    close = {name: score + 0.004 for name, score in data.expected["pretrained"].items()}
    require_published(data, "pretrained", close, 0.005)
    require_published(data, "pretrained", {"rte": 0.0}, None)
    with pytest.raises(
        MisconfigurationException, match=r"within 0.5 points .*: stsb 62.79, .*; rte 50.00, published 80.14"
    ):
        require_published(data, "pretrained", close | {"rte": 0.5, "stsb": 0.6279}, 0.005)
    with pytest.raises(MisconfigurationException, match="the experts should score within 1 points"):
        require_published(data, "individual", {"cola": 0.5}, 0.01)
    with pytest.raises(MisconfigurationException, match="GLUEData knows no published scores"):
        require_published(GLUEData(max_rows=5), "pretrained", close, 0.01)


def test_scorer_outside_a_trainer_equals_validation(base: Path, tmp_path: Path, make_trainer: Any) -> None:
    """K5, K7: one number a set, whoever asks; the loader's order and the batches do not matter."""
    write_glue(tmp_path, 12, ["cola", "stsb", "rte"])
    backbone = T5Backbone(str(base))
    backbone.load()
    outside = Scorer(backbone, glue(tmp_path, ["cola", "stsb"], ["rte"], batch_size=5))
    scores = {name: outside.score(name) for name in ("cola", "stsb", "rte")}
    module = ContinualMergeModule(T5Backbone(str(base)))
    trainer: L.Trainer = make_trainer()
    trainer.validate(module, glue(tmp_path, ["cola", "stsb"], ["rte"], batch_size=4), verbose=False)
    assert {name: module.last_scores[name] for name in scores} == scores
    assert all(value == value for value in module.last_scores.values())
    inputs, answers, _ = outside.data.labelled_set("cola").batches(backbone).__getitems__([0, 1])  # type: ignore[attr-defined]
    assert module(inputs, "cola") == backbone.generate(outside.data.labelled_set("cola").prompts([0, 1])[0])  # type: ignore[attr-defined]
    assert isinstance(outside.add("cola"), ExactMatchScore)
    assert not isinstance(CLIPBackbone(), T5Backbone)
    assert len(answers) == 2
