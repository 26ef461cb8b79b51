"""Image sets in files as the hub and folders have them; what is not as described is refused with the remedy."""

from pathlib import Path
from typing import Any

import pytest
from tiny_hub import labels_of, picture, rows_of, snapshot, write_set, write_tar

from safemerge_pl.data.image_files import choose_files, open_rows
from safemerge_pl.data.image_sets import TASKS, SetSpec, find_spec

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("name", [*TASKS, "imagenet", "imagenet-r", "objectnet"])
def test_every_set_opens_from_the_hub_s_cache(name: str, tmp_path: Path) -> None:
    """Offline, through ``refs/main``; boolean labels and web data sets included."""
    spec = find_spec(name)
    write_set(snapshot(tmp_path / "hub", spec.hub, "dataset"), name)
    rows = open_rows(spec, any_size=True)
    assert rows.column_names == ["image", "label"]
    assert [int(label) for label in rows["label"]] == labels_of(spec, 5)
    assert rows[1]["image"].convert("RGB").size == picture(1).size
    with pytest.raises(ValueError, match=rf"has 5 images, expected {spec.size} in the split '{spec.split}'"):
        open_rows(spec)


def test_a_cache_of_one_s_own(tmp_path: Path) -> None:
    spec = find_spec("dtd")
    write_set(snapshot(tmp_path / "mine" / "hub", spec.hub, "dataset"), "dtd")
    assert len(open_rows(spec, cache_dir=str(tmp_path / "mine"), any_size=True)) == 5
    assert (tmp_path / "mine" / "prepared").is_dir()
    assert not (tmp_path / "prepared").exists()


def test_a_folder_of_images(tmp_path: Path) -> None:
    for index, name in enumerate(find_spec("eurosat").classes):
        place = tmp_path / "eurosat" / "test" / f"{index}_{name}"
        place.mkdir(parents=True)
        picture(index).save(place / "test-1.png")
    rows = rows_of(tmp_path)
    assert [rows[index]["label"] for index in (0, 9)] == [0, 9]
    assert rows[9]["image"].size == picture(9).size


def test_a_folder_of_archives(tmp_path: Path) -> None:
    write_tar(tmp_path / "fer2013" / "test" / "0.tar", "jpg", [picture(0)], [3])
    write_tar(tmp_path / "fer2013" / "test" / "1.tar", "jpg", [picture(1)], [6])
    rows = rows_of(tmp_path, "fer2013")
    assert sorted(rows["label"]) == [3, 6]


def test_a_damaged_file(tmp_path: Path) -> None:
    place = tmp_path / "mnist" / "data"
    place.mkdir(parents=True)
    (place / "test-00000-of-00001.parquet").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"test-00000-of-00001.parquet cannot be read .*; fetch it again"):
        rows_of(tmp_path, "mnist")


def test_nothing_there_says_how_to_get_it(tmp_path: Path) -> None:
    """A missing set offline: the sentence holds the command."""
    with pytest.raises(
        ValueError, match=r"HF_HUB_OFFLINE is set\); .*`hf download tanganke/eurosat --repo-type dataset"
    ):
        open_rows(find_spec("eurosat"))
    with pytest.raises(ValueError, match=r"eurosat does not exist; .*`hf download tanganke/eurosat"):
        rows_of(tmp_path)


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from safemerge_pl.data import image_files

    asked = []

    class Session:
        def head(self, *args: Any, **kwargs: Any) -> None:
            asked.append(args)
            raise ConnectionError

    image_files._hub_answers.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    for name in ("eurosat", "mnist"):
        with pytest.raises(ValueError, match=r"cannot be fetched \(the hub does not answer\)"):
            open_rows(find_spec(name))
    assert len(asked) == 1
    image_files._hub_answers.cache_clear()


def test_only_the_split_is_fetched_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for the hub: what is asked for; the converted branch where the main one has nothing."""
    spec = find_spec("rendered-sst2")
    asked = []

    class Api:
        def list_repo_files(self, repo: str, *, repo_type: str, revision: str | None) -> list[str]:
            assert (repo, repo_type) == (spec.hub, "dataset")
            if revision is None:
                return ["README.md", "images.zip", "load.py"]
            return ["default/test/0000.parquet", "default/train/0000.parquet", "default/partial-test/0000.parquet"]

    def download(repo: str, **kwargs: Any) -> str:
        asked.append(kwargs)
        return str(write_set(tmp_path / "got", "rendered-sst2", file="test-0000.parquet"))

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("safemerge_pl.data.image_files._hub_answers", lambda endpoint: True)
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert len(open_rows(spec, any_size=True)) == 5
    (call,) = asked
    assert call["revision"] == "refs/convert/parquet"
    assert call["allow_patterns"] == ["default/test/0000.parquet", "classnames.txt"]
    assert not call["local_files_only"]


@pytest.mark.parametrize(
    ("paths", "config", "expected"),
    [
        (["mnist/test-00000-of-00001.parquet", "mnist/train-00000-of-00001.parquet"], None, [0]),
        (["a/test-0.parquet", "b/test-0.parquet"], "b", [1]),
        (["test/0.tar", "test/1.tar", "test/nshards.txt", "train/0.tar", "classnames.txt"], None, [0, 1]),
        (["data/test-00000-of-00002-0f3a.parquet", "data/test-00001-of-00002-77bc.parquet"], None, [0, 1]),
        (["test/cat/test-1.png", "test/dog/2.JPG", "train/cat/3.png"], None, [0, 1]),
        (["test_extra/0.parquet", "contest/0.parquet", "testing.parquet", "test_matched-0.parquet"], None, []),
        (["test.parquet", "test/0.tar"], None, [0]),
    ],
)
def test_files_of_a_split(paths: list[str], config: str | None, expected: list[int]) -> None:
    assert choose_files(paths, "test", config) == [paths[index] for index in expected]


def test_two_configurations_need_a_name() -> None:
    with pytest.raises(
        ValueError, match=r"several configurations have a split 'test' \(a/, b/\); name one as `config`"
    ):
        choose_files(["a/test-0.parquet", "b/test-0.parquet"], "test")


def test_classes_that_are_not_called_like_their_folders(tmp_path: Path) -> None:
    """The order of folders is that of their names, 10 before 2: with other names in a list nothing would show it."""
    for name in ("0", "1", "10"):
        (tmp_path / "own" / "test" / name).mkdir(parents=True)
        picture(0).save(tmp_path / "own" / "test" / name / "a.png")
    spec = SetSpec("own", "owner/own", "test", ("zero", "one", "ten"), ("a {}",))
    with pytest.warns(UserWarning, match=r"no class is called like its folder \('zero' for the folder 0, "):
        assert open_rows(spec, str(tmp_path))["label"] == [0, 1, 2]
