"""Results are found again on disk, and nothing goes wrong where they are not."""

import sys
from pathlib import Path

import platformdirs
import pytest
import torch

from safemerge_pl.runtime.disk_cache import CachedTensors, cache_file, cache_folder, load_tensor, save_tensor


def test_the_user_says_where_results_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/caches")
    monkeypatch.setenv("SAFEMERGE_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("SAFEMERGE_CACHE", "")
    assert cache_folder() is None
    monkeypatch.delenv("SAFEMERGE_CACHE")
    assert cache_folder() == tmp_path / "caches" / "safemerge_pl"


@pytest.mark.parametrize("home", [None, ""])
def test_else_the_system_says_it(home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SAFEMERGE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert cache_folder() == platformdirs.user_cache_path("safemerge_pl", appauthor=False)
    if sys.platform == "linux":
        assert cache_folder() == tmp_path / ".cache" / "safemerge_pl"


def test_names_of_kept_files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another name would leave all that was kept before unused."""
    monkeypatch.setenv("SAFEMERGE_CACHE", "/kept")
    file = cache_file("bases", [["a", 1, "AVX2"], "general_basis/8"])
    assert file == Path("/kept/bases/b71b438f92a9fd55023bc4f766de1548.safetensors")
    assert cache_file("scores", "x", "json") == Path("/kept/scores/ba2df4903a2c14e86dc3bcca58911b44.json")
    monkeypatch.setenv("SAFEMERGE_CACHE", "")
    assert cache_file("bases", "x") is None


def test_a_tensor_comes_back_as_it_was(tmp_path: Path) -> None:
    tensor = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).T
    save_tensor(tmp_path / "new" / "one.safetensors", tensor)
    found = load_tensor(tmp_path / "new" / "one.safetensors")
    assert found is not None
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


@pytest.mark.parametrize("content", [None, b"", b"damaged"])
def test_a_missing_or_damaged_file_is_as_good_as_none(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    if content is not None:
        file.write_bytes(content)
    assert load_tensor(file) is None
    assert load_tensor(None) is None


def test_nothing_is_kept_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    save_tensor(tmp_path / "file" / "one.safetensors", torch.ones(1))
    save_tensor(None, torch.ones(1))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_tensors_of_one_run_are_read_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFEMERGE_CACHE", str(tmp_path))
    cpu = torch.device("cpu")
    CachedTensors(["model", 1], cpu)["basis"] = torch.arange(3.0)
    CachedTensors(None, cpu)["basis"] = torch.zeros(3)  # stays in memory
    later = CachedTensors(["model", 1], cpu)
    assert len(later) == 0
    assert later["basis"].tolist() == [0, 1, 2]
    assert list(later) == ["basis"]
    del later["basis"]
    assert "basis" in later  # the file is still there
    assert "basis" not in CachedTensors(["model", 2], cpu)
    assert "basis" not in CachedTensors(None, cpu)
