"""The progress bar of a stream."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loops import Classifier, batches, encoder, live

from safemerge_pl.callbacks import MergedModelWriter, StreamProgress
from safemerge_pl.merger import ContinualMerger

Make = Callable[..., Any]


pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


def test_the_other_callbacks_go_along(make_trainer: Make, tmp_path: Path, capsys: Any) -> None:
    """The stream's own progress bar and writer work in a training loop, too."""
    writer = MergedModelWriter(folder=str(tmp_path / "out"))
    merge, module = live(boundary="fit"), Classifier()
    base = encoder(module)
    make_trainer(merge, writer, StreamProgress(), enable_progress_bar=True, max_epochs=2).fit(
        module, batches(0), batches(0)
    )
    assert "merged model" in capsys.readouterr().out
    assert ContinualMerger.load(tmp_path / "out", base).tasks == ["task1"]
