"""GLUE as text to text: the published prompts, the files that are read, what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_text import ABOUT, examples, glue, table, write_glue

from safemerge_pl.data.glue import GLUEData
from safemerge_pl.functional import summarise

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
    """To the letter, typos included; braces in a text are plain text."""
    prompt, answers = PROMPTS[name]
    texts = dict(zip(COLUMNS[name], ("a {b}", "c"), strict=False))
    rows = [{**texts, "label": label, "idx": label} for label in range(len(answers))]
    (tmp_path / name).mkdir()
    table(name, rows).to_parquet(tmp_path / name / f"{ABOUT[name]['split']}-00000-of-00001.parquet")
    assert glue(tmp_path, [name]).load_set(name).prompts(range(len(rows))) == ([prompt] * len(rows), answers)


def test_stsb_asks_for_one_decimal_of_the_stored_score(tmp_path: Path) -> None:
    """The gold answer is the one-decimal string, not the raw score."""
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
    """Order, splits, reference numbers; their means are the paper's rows."""
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
    """By branch name, offline; a file that is not in the cached snapshot is named."""
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
