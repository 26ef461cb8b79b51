"""Merged weights that wait on disk are the ones that would wait in memory."""

from pathlib import Path

import pytest
import tiny
import torch

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.checkpoints.tensors import LazyTensors
from safemerge_pl.folding.store import DiskTensors
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, MergeMethod, TiesMerging


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    store = DiskTensors(tmp_path / "store")
    tensors = {"a": torch.randn(3, 4).T, "b": torch.tensor(2.5), "c": torch.zeros(0, 4), "d/e": torch.ones(2).half()}
    store.update(tensors)
    assert list(store) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(store[name], tensor.float())
    store["a"][0, 0] = 7.0  # a copy
    assert torch.equal(store["a"], tensors["a"])
    store["a"] = torch.ones(1)
    del store["b"]
    assert (store["a"].tolist(), len(store), len(list(store.folder.iterdir()))) == ([1.0], 3, 3)
    store["b"], store["f"] = torch.zeros(2), torch.ones(3)
    assert [store[name].tolist() for name in ("d/e", "b", "f")] == [[1.0] * 2, [0.0] * 2, [1.0] * 3]  # a file each
    store.close()
    assert not store.folder.exists()


def test_whether_a_tensor_is_there_is_known_without_reading_it(tmp_path: Path) -> None:
    store = DiskTensors(tmp_path / "store")
    store["a"] = torch.ones(2)
    for file in store.folder.iterdir():
        file.unlink()
    reads: list[str] = []
    lazy = LazyTensors(["a"], lambda name: reads.append(name) or torch.ones(1))  # type: ignore[func-returns-value]
    for tensors in (store, lazy):
        assert "a" in tensors
        assert "b" not in tensors
    assert reads == []


@pytest.mark.parametrize(
    "method", [tiny.fast_method(), OPCM(), TiesMerging()], ids=lambda method: type(method).__name__
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_merge_on_disk_equals_one_in_memory(method: MergeMethod, fused: bool, tmp_path: Path) -> None:
    """It also continues from its folder without reading it whole."""
    base = dict(tiny.open_clip_model().state_dict()) if fused else tiny.tower()
    here, there = ContinualMerger(base, method), ContinualMerger(base, method, workspace=tmp_path / "work")
    expected = [here.fold(tiny.tuned(base, seed), f"task{seed}").merged for seed in (1, 2, 3)]
    found = [there.fold(tiny.tuned(base, seed), f"task{seed}").merged for seed in (1, 2)]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["2"]
    tiny.assert_same(dict(there.merged_parameters()), {name: there.merged[name] for name in there.merged_parameters()})
    there.save(tmp_path / "out")
    again = ContinualMerger.load(tmp_path / "out", base, method=method, workspace=tmp_path / "next")
    assert not (tmp_path / "next").exists()
    found.append(again.fold(tiny.tuned(base, 3), "task3").merged)
    again.save(tmp_path / "out")
    assert found == expected
    tiny.assert_same(ContinualMerger.load(tmp_path / "out", base, method=method).merged, here.merged)


def test_a_fold_that_fails_leaves_the_merge_on_disk(tmp_path: Path) -> None:
    base = tiny.tower()
    merger = ContinualMerger(base, tiny.fast_method(), workspace=tmp_path)
    merger.fold(tiny.tuned(base, 1), "one")
    before = merger.fingerprint()
    with pytest.raises(CheckpointError):
        merger.fold(tiny.tuned(base, 2, scale=1e30), "two")
    assert merger.fingerprint() == before
    twin = tiny.folded(1, 2)
    merger.fold(tiny.tuned(base, 2), "task2")
    assert merger.fingerprint() == twin.fingerprint()
