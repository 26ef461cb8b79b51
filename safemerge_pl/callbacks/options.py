"""Options for merging inside a training loop."""

from collections.abc import Callable

import lightning as L
from typing_extensions import TypedDict

from safemerge_pl.callbacks.scores import Score
from safemerge_pl.live import Rest, RestartFrom

__all__ = ["LiveOptions"]


class LiveOptions(TypedDict, total=False):
    """Options for merging what a training loop trains; ``epochs_per_task`` or ``boundary`` turns it on.

    Args:
        epochs_per_task: a task ends after every so many epochs.
        boundary: instead, ``"fit"`` if every call of ``fit`` is a task; the name of an attribute of the data module
            that tells the current task (a task ends when it changes); or a function of the trainer that is asked once
            an epoch, after its last batch, whether a task ends there.
        tasks: names of the tasks in their order; else those of the data module's ``stream``, the values of the
            ``boundary`` attribute, or ``task1``, ``task2``, ...
        restart_from: weights that each task starts from: ``"pretrained"`` (the paper's setting) or ``"merged"``.
        rest: tensors of the merged part that no method merges: ``"pretrained"`` puts them back at each boundary, as in
            the paper; ``"keep"`` leaves them as trained. What is outside of ``module_attr`` is never touched.
        pretrained: the pretrained weights (folder, file or hub id), if the module was trained before.
        metric: name of the accuracy that the module logs in validation, with one validation loader per task and then
            one per control set; or with ``{task}`` in it, one name per task. Accuracies are shares in [0, 1].
        score: instead, a function of trainer and module that returns the accuracy by task.
        controls: names of held-out sets in ``metric`` or ``score``; their mean is Gen.
        output: folder for the merged model, written at the end of ``fit``.
    """

    epochs_per_task: int
    boundary: str | Callable[[L.Trainer], bool]
    tasks: list[str] | str
    restart_from: RestartFrom
    rest: Rest
    pretrained: str
    metric: str
    score: Score
    controls: list[str] | str
    output: str
