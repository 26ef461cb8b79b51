"""Names under which scores are logged."""

from collections.abc import Collection, Mapping

__all__ = ["tag_scores"]


def tag_scores(
    scores: Mapping[str, float], tasks: Collection[str], controls: Collection[str], group: str = "stream"
) -> dict[str, float]:
    """Scores by the names that loggers get: the one place that says them.

    Args:
        scores: by task, by control set, and by score of the whole stream.
        tasks: which names are tasks.
        controls: which names are control sets; every other name is a score of the stream.
        group: what the scores of the stream stand under.

    Example:
        >>> tag_scores({"mnist": 0.75, "probe": 0.25, "H": 0.5}, tasks=["mnist"], controls=["probe"])
        {'task/mnist/acc': 0.75, 'control/probe/acc': 0.25, 'stream/H': 0.5}
    """
    tags = {name: f"control/{name}/acc" for name in controls} | {name: f"task/{name}/acc" for name in tasks}
    return {tags.get(name, f"{group}/{name}"): value for name, value in scores.items()}
