"""Finding the model of each task, and saying at once which are missing."""

from pathlib import Path

import pytest
import tiny
from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.data.experts import find_experts
from safemerge_pl.zoo import FILES


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    for task in ("a", "b"):
        tiny.folder_of(tmp_path / "experts" / task, {"x": tiny.randn(1)})
    return tmp_path / "experts"


def test_the_zoo_holds_its_tasks() -> None:
    found = find_experts("zoo", ["weather", "mnist"])
    assert found == {"weather": FILES / "experts" / "weather", "mnist": FILES / "experts" / "mnist"}


def test_a_folder_holds_a_folder_a_task(experts: Path) -> None:
    found = find_experts(str(experts), ["b", "a"])
    assert list(found) == ["b", "a"]
    assert found == {"a": experts / "a", "b": experts / "b"}


def test_a_pattern_names_each_file(tmp_path: Path) -> None:
    for task in ("a", "b"):
        (tmp_path / f"vit-{task}-final.pt").touch()
    found = find_experts(str(tmp_path / "vit-{task}-final.pt"), ["a", "b"])
    assert found["b"] == tmp_path / "vit-b-final.pt"


def test_the_first_place_that_has_a_task_wins(experts: Path) -> None:
    tiny.folder_of(experts / "mnist", {"x": tiny.randn(1)})
    found = find_experts([str(experts), "zoo"], ["a", "mnist", "flags"])
    assert found == {"a": experts / "a", "mnist": experts / "mnist", "flags": FILES / "experts" / "flags"}
    assert find_experts(["zoo", str(experts)], ["mnist"])["mnist"] == FILES / "experts" / "mnist"


@pytest.mark.parametrize("place", ["tanganke/clip-vit-base-patch32_{task}", "owner-1/{task}"])
def test_a_hub_pattern_is_left_to_the_hub(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_experts(place, ["mnist"]) == {"mnist": place.replace("{task}", "mnist")}


def test_a_local_path_wins_over_a_hub_pattern(experts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(experts.parent)
    assert find_experts("experts/{task}", ["a"]) == {"a": Path("experts/a")}
    with pytest.raises(MisconfigurationException, match="experts/c not found"):
        find_experts("experts/{task}", ["c"])


@pytest.mark.parametrize(
    "place", ["/no/such/{task}", "./{task}/x", "~/no-such-folder/{task}", "one/two/{task}", "{task}.pt"]
)
def test_what_looks_like_a_path_is_no_hub_id(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MisconfigurationException, match="task 'c' has no model"):
        find_experts(place, ["c"])


def test_the_home_folder_is_found(experts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(experts.parent))
    assert find_experts("~/experts", ["a"]) == find_experts("~/experts/{task}", ["a"]) == {"a": experts / "a"}


def test_every_missing_task_is_named_at_once_with_every_place(experts: Path) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        find_experts([str(experts), "zoo"], ["a", "cars", "mnist", "dtd"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    for line, task in zip(lines, ("cars", "dtd"), strict=True):
        assert f"task '{task}'" in line
        assert str(experts / task) in line
        assert str(FILES / "experts" / task) in line


def test_a_mapping_is_taken_as_it_is() -> None:
    given = {"a": "owner/name", "b": Path("x.pt"), "c": {"w": tiny.randn(1)}, "extra": "unused"}
    found = find_experts(given, ["c", "a", "b"])
    assert list(found) == ["c", "a", "b"]
    assert all(found[task] is given[task] for task in found)


def test_a_mapping_without_a_task_is_refused_with_what_it_has() -> None:
    with pytest.raises(MisconfigurationException, match=r"names no model for cars, dtd; it has a, b"):
        find_experts({"a": "x", "b": "y"}, ["cars", "a", "dtd"])
