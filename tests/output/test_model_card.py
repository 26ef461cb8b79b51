"""The model card of an output."""

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from folders import clip_folder
from tiny import as_file, folded, fresh, tower, tuned

from safemerge_pl import __version__


def test_the_model_card_tells_tasks_and_sources(tmp_path: Path) -> None:
    merger = fresh()
    file = as_file(tuned(tower(), 1), tmp_path / "expert")
    merger.fold(file, "digits")
    card = (merger.save(tmp_path / "out") / "README.md").read_text()
    assert str(tmp_path) not in card
    for text in ("digits", file.name, merger.fingerprint(), merger.reference, "keep_ratio=0.5"):
        assert text in card


def front_matter(out: Path) -> dict[str, Any]:
    from huggingface_hub import ModelCard

    text = (out / "README.md").read_text()
    parsed: dict[str, Any] = yaml.safe_load(text.split("---")[1])
    assert ModelCard(text).data.to_dict() == parsed
    return parsed


def test_the_card_has_a_front_matter_that_the_hub_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's name of the base where it has one; a local path means nothing to others."""
    base = clip_folder(tmp_path / "base")
    merger = fresh(base)
    merger.fold(tuned(tiny.hf_clip().state_dict(), 1), "a | b\nc")
    found = front_matter(merger.save(tmp_path / "out"))
    assert found["library_name"] == "transformers"
    assert "merge" in found["tags"]
    assert "base_model" not in found
    merger.pretrained.source = "openai/clip-vit-base-patch32"
    out = merger.save(tmp_path / "out")
    assert front_matter(out)["base_model"] == "openai/clip-vit-base-patch32"
    row = next(line for line in (out / "README.md").read_text().splitlines() if "a \\| b c" in line)
    assert row.replace("\\|", "").count("|") == 9


def test_the_card_tells_how_to_make_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/safemerge", "fold", "--task", "two words"])
    out = folded(1).save(tmp_path / "out")
    card = (out / "README.md").read_text()
    assert "command: `safemerge fold --task 'two words'`" in card
    assert f"safemerge_pl {__version__}" in card
    assert torch.__version__.split("+")[0] in card
    assert f"`{folded(1).fingerprint()}`" in card


def test_no_local_path_is_told_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in rows and notes, nor in the command, whatever form it has there."""
    home = tmp_path / "my home"
    base = tiny.folder_of(home / "base", tower())
    expert = tiny.folder_of(home / "expert", tuned(tower(), 1))
    monkeypatch.setattr(
        sys, "argv", ["safemerge", "fold", f"--pretrained={base}", "--incoming", "/data/x/expert", "~/a/b"]
    )
    merger = fresh(base)
    merger.fold(str(expert), "digits")
    card = (merger.save(tmp_path / "out") / "README.md").read_text()
    for place in (str(tmp_path), "my home", "/data", "~/"):
        assert place not in card
    assert "| 1 | digits | `expert` |" in card
    assert "`base` with 1 fine-tuned model" in card
    assert "note: base holds no config.json" in card
    assert "--incoming expert" in card


CARD = "---\nlicense: {license}\ndatasets: {sets}\npipeline_tag: image-classification\n---\n# A model\n"


def test_the_front_matter_tells_of_models_licence_data_and_scores(tmp_path: Path) -> None:
    base = clip_folder(tmp_path / "base")
    expert = tiny.folder_of(
        tmp_path / "expert", tuned(tower("vision_model."), 1, 0.0) | tuned(tiny.hf_clip().state_dict(), 1)
    )
    (base / "README.md").write_text(CARD.format(license="mit", sets="[owner/photos]"))
    (expert / "README.md").write_text(CARD.format(license="mit", sets="[owner/digits, owner/photos]"))
    merger = fresh(base)
    merger.fold(str(expert), "digits")
    merger.pretrained.source = "owner/base@v1"
    scores = {"digits": 0.5, "photos": 0.25, "ACC": 0.5, "Gen": 0.25}
    found = front_matter(merger.save(tmp_path / "out", scores=scores))
    assert found["license"] == "mit"
    assert (found["base_model"], found["base_model_relation"]) == ("owner/base", "merge")
    assert found["datasets"] == ["owner/photos", "owner/digits"]
    (results,) = found["model-index"]
    told = {entry["dataset"]["name"]: entry["metrics"][0]["value"] for entry in results["results"]}
    assert told == {"digits": 0.5, "photos": 0.25}
    assert {entry["task"]["type"] for entry in results["results"]} == {"image-classification"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| digits | 50.0 |" in card
    assert "| ACC | 50.0 |" in card
    (expert / "README.md").write_text(CARD.format(license="cc-by-4.0", sets="[1, 2]"))
    out = merger.save(tmp_path / "out")
    assert "license" not in front_matter(out)
    assert "model-index" not in front_matter(out)
    assert "- licences, all of which bind the merge: the base mit, digits cc-by-4.0" in (out / "README.md").read_text()
    (expert / "README.md").write_text("---\n: [\n---\n")
    assert front_matter(merger.save(out))["license"] == "mit"
