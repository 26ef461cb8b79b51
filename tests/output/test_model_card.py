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
    for text in ("digits", str(file), merger.fingerprint(), merger.reference, "keep_ratio=0.5"):
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
