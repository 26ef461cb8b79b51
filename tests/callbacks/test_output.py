"""The merged model as a folder."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from small import TASKS, tower
from streams import direct
from tiny import tower_of

from safemerge_pl.callbacks import MergedModelWriter, StreamReport
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.output.files import LEDGER_FILE
from safemerge_pl.zoo import FILES

Make = Callable[..., Any]


def test_smoke_run_writes_nothing(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    writers = (StreamReport(folder=str(tmp_path / "report")), MergedModelWriter(folder=str(tmp_path / "merged")))
    make_trainer(merge_callback(), *writers, fast_dev_run=True).fit(module, small_data())
    assert not (tmp_path / "report").exists()
    assert not (tmp_path / "merged").exists()


def test_output_is_checked_before_the_stream_and_loads_afterwards(
    module: ContinualMergeModule, small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path
) -> None:
    from transformers import AutoProcessor, CLIPModel, CLIPVisionModel

    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no earlier merge"):
        make_trainer(merge_callback(), MergedModelWriter(folder=str(tmp_path / "taken"))).fit(
            ContinualMergeModule(), small_data()
        )
    out = tmp_path / "merged"
    merge = merge_callback()
    writer = MergedModelWriter(folder=str(out), dtype="float32", max_shard_size="2MB")
    make_trainer(merge, writer).fit(module, small_data())
    assert (out / "model.safetensors.index.json").exists()
    assert len((out / LEDGER_FILE).read_text().splitlines()) == len(TASKS)
    for kind in (CLIPVisionModel, CLIPModel):
        model, info = kind.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"]
        found = tower_of(model).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in tower(module).items())
    assert AutoProcessor.from_pretrained(out) is not None
    again = ContinualMerger.load(out, FILES / "model")
    assert again.fingerprint() == direct(TASKS).fingerprint()
    card = (out / "README.md").read_text()
    assert module.last_scores
    for name, score in module.last_scores.items():
        assert f"| {name} | {100 * score:.1f} |" in card


def test_a_disk_without_room_is_refused_before_the_stream(
    small_data: Make, make_trainer: Make, merge_callback: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safemerge_pl.output.folders.shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    merge = merge_callback()
    trainer = make_trainer(merge, MergedModelWriter(folder=str(tmp_path / "merged")))
    with pytest.raises(MisconfigurationException, match=r"merged needs about [\d.]+ MB and .* has 0\.0 MB free"):
        trainer.fit(ContinualMergeModule(), small_data())
    assert merge.tasks == []
    assert not (tmp_path / "merged").exists()
