"""Checks that refuse a study before anything of it is measured."""

from collections.abc import Mapping, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.functional import SCORES
from safemerge_pl.reports.study import StudyFigure
from safemerge_pl.runtime.names import did_you_mean
from safemerge_pl.scoring.rows import require_published
from safemerge_pl.study.cells import StudyRow

__all__ = ["check_study"]


def check_study(
    rows: Sequence[StudyRow],
    streams: Mapping[str, StreamDataModule],
    figures: Sequence[StudyFigure],
    sets: Sequence[str],
    assert_scores: float | None,
) -> list[str]:
    """See that figures, sets, rows and published scores name what the study has.

    Returns:
        Notes for the user.

    Raises:
        MisconfigurationException: for the first that does not.
    """
    known = {name for data in streams.values() for name in (*data.stream, *data.controls)}
    for figure in figures:
        _check_figure(figure, rows, known)
    unknown = [name for name in sets if name not in known]
    if unknown:
        raise MisconfigurationException(f"`sets`: no stream has a set {', '.join(unknown)}.")
    for data in streams.values():
        require_published(data, "pretrained", {}, assert_scores)
    for row in rows:
        stray = next((name for name in row.at if name not in streams and not name.isdecimal()), None)
        if stray is not None:
            raise MisconfigurationException(
                f"row '{row.label}', `at`: the study has no stream '{stray}'; {did_you_mean(stray, streams)}"
            )
    # a row may say what holds for streams of other lengths, such as 14 and 20, whether or not the study has them
    unused = dict.fromkeys(name for row in rows for name in row.at if name not in streams)
    return (
        [f"the study has no stream {' or '.join(unused)}; what rows set for it under `at` is not used"]
        if unused
        else []
    )


def _check_figure(figure: StudyFigure, rows: Sequence[StudyRow], sets: set[str]) -> None:
    varied = {key for row in rows for key in row.vary}
    unknown = [name for name in figure.y if name not in sets.union(SCORES)]
    if figure.x not in varied.union(SCORES):
        unknown.insert(0, figure.x)
    labels = {row.label for row in rows}
    unknown += [label for label in figure.rows or () if label not in labels]
    if unknown:
        raise MisconfigurationException(f"figure '{figure.file}': the study has no {', '.join(unknown)}.")
