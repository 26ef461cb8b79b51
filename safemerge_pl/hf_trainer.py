"""Merging under the ``Trainer`` of transformers: one ``train()`` per task."""

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from safemerge_pl.live import LiveMerger
from safemerge_pl.runtime.names import name_list

__all__ = ["MergeTrainerCallback"]


class MergeTrainerCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Fold what a ``Trainer`` has trained at the end of ``train()``, and start the next from the pretrained weights.

    Use it with one ``Trainer`` per task on one model: the optimiser and its schedule are then fresh for every task.
    After ``train()`` the model holds the merged weights, so ``evaluate()`` and ``save_model()`` see those. Checkpoints
    that the ``Trainer`` writes during training hold the weights in training; ``load_best_model_at_end`` comes before
    the fold.

    Args:
        merger: made from the model (or the part of it that is merged) before it is trained.
        tasks: names of the tasks in their order; ``task1``, ``task2``, ... if left out.

    Example:
        >>> import torch
        >>> from safemerge_pl import LiveMerger
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> callback = MergeTrainerCallback(LiveMerger(model, layers=["*weight"]), tasks=["mnist"])
        >>> callback.merger.tasks
        []

    Used so::

        merge = MergeTrainerCallback(LiveMerger(model.vit), tasks=list(datasets))
        for name, data in datasets.items():
            Trainer(model, args, train_dataset=data, callbacks=[merge]).train()
        merge.merger.save("merged")
    """

    def __init__(self, merger: LiveMerger, tasks: str | Sequence[str] = ()) -> None:
        self.merger, self.tasks = merger, name_list(tasks, "tasks")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a task with the weights that it starts from."""
        if self.tasks and len(self.merger.tasks) >= len(self.tasks):
            raise ValueError(f"all {len(self.tasks)} tasks ({', '.join(self.tasks)}) are merged; name more `tasks`.")
        if args.fsdp or args.deepspeed:
            raise ValueError(
                "FSDP and DeepSpeed split each weight among processes, and a merge needs whole matrices; use one "
                "device or plain data parallelism."
            )
        if state.global_step:
            raise ValueError(
                f"this training resumes at step {state.global_step}, but the merge would begin its task anew; fold the "
                "finished model with `ContinualMerger.fold` instead."
            )
        model = kwargs.get("model")
        mine = {id(parameter) for parameter in self.merger.module.parameters()}
        if model is not None and mine.isdisjoint(map(id, model.parameters())):
            raise ValueError(
                f"the Trainer trains a {type(model).__name__} that the merger's {type(self.merger.module).__name__} is "
                "no part of (`model_init` makes a new one each time); give the Trainer the model that the merger was "
                "made from."
            )
        self.merger.device = args.device
        self.merger.restart()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fold the task; the model holds the merged weights from here on."""
        done = len(self.merger.tasks)
        task = self.tasks[done] if self.tasks else f"task{done + 1}"
        self.merger.fold_trained(task, f"trained until step {state.global_step}")
