"""What version 0.1.0 wrote is read, continued and counted as known: merge folders, Lightning checkpoints, study cells.

`written_by_0_1/make.py` made the files. What was stored is compared bit for bit. A continuation runs on whatever
processor the tests run on, so it is compared with the stored one to the rounding of float32.
"""

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import safemerge_pl as sm

HERE = Path(__file__).parent / "written_by_0_1"
KNOWN: dict[str, Any] = json.loads((HERE / "known.json").read_text())


def _make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("written_by_0_1", HERE / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = _make()


def assert_close(found: dict[str, torch.Tensor], file: str) -> None:
    expected = load_file(HERE / file)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("name", MAKE.METHODS)
@pytest.mark.parametrize("given", [True, False], ids=["method given", "method from the folder"])
def test_a_merge_folder_is_continued(name: str, given: bool, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(HERE / name, tmp_path / "merge"))
    method = MAKE.METHODS[name]() if given else None
    merger = sm.ContinualMerger.load(folder, HERE / "model0.safetensors", method=method)
    assert merger.fingerprint() == KNOWN[name]["merged"]
    assert merger.ledger == KNOWN[name]["ledger"]
    assert merger.tasks == ["task1", "task2"]
    merger.fold(HERE / "model3.safetensors", "task3")
    assert_close(merger.merged, f"{name}_continued.safetensors")
    if name == "task_arithmetic":  # additions alone: the same on every processor
        assert merger.fingerprint() == KNOWN[name]["continued"]
    merger.save(folder)
    again = sm.ContinualMerger.load(folder, HERE / "model0.safetensors")
    assert again.ledger[:2] == KNOWN[name]["ledger"]
    assert again.fingerprint() == merger.fingerprint()


def test_a_checkpoint_of_a_training_loop_is_resumed() -> None:
    callback, module = MAKE.live_callback(), MAKE.Loop()
    MAKE.trainer(callback, 3).fit(module, ckpt_path=HERE / "live.ckpt", weights_only=True)
    assert callback.tasks == ["a", "b", "c"]
    assert_close(callback.merger.merged, "live_continued.safetensors")


def test_a_checkpoint_of_a_stream_is_resumed(tmp_path: Path) -> None:
    clip = MAKE.with_tokenizer(Path(shutil.copytree(HERE / "clip", tmp_path / "clip")))
    module, merge = MAKE.stream_parts(clip, HERE / "clip_experts")
    MAKE.trainer(merge, 2).fit(module, MAKE.few_images(MAKE.TASKS, MAKE.PROBE), ckpt_path=HERE / "stream.ckpt")
    assert merge.tasks == MAKE.TASKS
    assert_close(merge.merger.merged, "stream_continued.safetensors")
    assert module.last_scores.keys() == KNOWN["stream"]["scores"].keys()
    assert module.matrix is not None
    assert not module.matrix.accuracy[0, 0].isnan()  # the row that was measured before


def test_the_cells_of_a_study_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    MAKE.experts(Path("experts"))
    shutil.copytree(HERE / "cells", tmp_path / "study" / "cells")
    before = {path.name: path.read_bytes() for path in (tmp_path / "study" / "cells").iterdir()}
    MAKE.small_study("study").run()
    printed = capsys.readouterr().out
    assert printed.count("(known)") == 3
    assert "expert" not in printed  # the reference rows are known, too
    assert {path.name: path.read_bytes() for path in (tmp_path / "study" / "cells").iterdir()} == before
