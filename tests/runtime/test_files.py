"""Files are written whole or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from safemerge_pl.runtime.files import write_figure, write_json, write_text


def test_json_is_strict(tmp_path: Path) -> None:
    """NaN is refused, not written, and an earlier file stays."""
    path = tmp_path / "deep" / "report.json"
    write_json(path, {"ACC": 0.5, "tasks": ["ä"]})
    assert json.loads(path.read_text()) == {"ACC": 0.5, "tasks": ["ä"]}
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            write_json(path, {"BWT": bad})
    assert json.loads(path.read_text()) == {"ACC": 0.5, "tasks": ["ä"]}
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]


@pytest.mark.parametrize("failing", ["write_bytes", "replace"])
def test_a_failed_write_keeps_the_earlier_file_and_leaves_no_part(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full midway."""
    path = tmp_path / "report.md"
    write_text(path, "first")
    real = Path.write_bytes

    def full(self: Path, *args: Any, **kwargs: Any) -> None:
        if failing == "write_bytes":
            real(self, b"sec")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, failing, full)
        with pytest.raises(OSError, match="No space left"):
            write_text(path, "second")
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.md"]
    write_text(path, "second")
    assert path.read_text() == "second"


def test_text_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    write_text(tmp_path / "card.md", "λ = 0.8")
    assert (tmp_path / "card.md").read_bytes() == b"\xce\xbb = 0.8"


def test_a_figure_is_a_png_of_its_size(tmp_path: Path) -> None:
    write_figure(tmp_path / "plots" / "x.png", Figure(figsize=(2, 1)))
    with Image.open(tmp_path / "plots" / "x.png") as image:
        assert (image.format, image.size) == ("PNG", (240, 120))
