"""The LightningModule of a merge stream: holds the merged backbone and scores it."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import Tensor

from safemerge_pl.backbones import Backbone, CLIPBackbone, build_backbone
from safemerge_pl.backbones.hyper_parameters import require_known_file
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.functional import summarise
from safemerge_pl.metrics import AccuracyMatrix
from safemerge_pl.scoring.scorer import Scorer
from safemerge_pl.scoring.tags import tag_scores

__all__ = ["ContinualMergeModule"]


class ContinualMergeModule(L.LightningModule):
    """Wraps the backbone that models are merged into; an epoch is one task.

    The module never trains: a :class:`safemerge_pl.callbacks.MergeCallback` folds the next model in at the start of
    each epoch, and the epoch's validation scores the result. It optimises nothing and its loss is a fresh zero, so
    Lightning counts one step per merge and checkpoints as usual.

    Logged after each merge, over the number of merged tasks: ``stream/ACC``, ``stream/BWT``, ``stream/Gen``,
    ``stream/H``, ``task/<name>/acc`` and ``control/<name>/acc``, all as shares in ``[0, 1]``. What is undefined (BWT
    of one task) is not logged.

    Args:
        backbone: the model, or its description as ``class_path`` and ``init_args``.

    Example:
        >>> module = ContinualMergeModule()
        >>> module.hparams.backbone["class_path"]
        'safemerge_pl.backbones.CLIPBackbone'
    """

    def __init__(self, backbone: Backbone | dict[str, Any] | None = None) -> None:
        super().__init__()
        built = build_backbone(CLIPBackbone() if backbone is None else backbone)
        self.save_hyperparameters({"backbone": built.spec()})
        self.backbone = built
        self.merged_tasks: list[str] = []
        self.matrix: AccuracyMatrix | None = None
        self.last_scores: dict[str, float] = {}  # of the latest evaluation, by set and by ACC, BWT, Gen, H
        self.scorer: Scorer | None = None  # no module: what it holds is rebuilt, not saved

    @_restricted_classmethod  # as Lightning's own: calling it on an instance is an error
    def load_from_checkpoint(
        cls,  # noqa: N805
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> "ContinualMergeModule":
        """A module from a checkpoint, as Lightning builds it, once what the checkpoint names is known to be harmless.

        Raises:
            CheckpointError: if it names a class that is no backbone or is not imported; pass ``backbone`` then.
        """
        plain = weights_only is not False
        require_known_file(cls, checkpoint_path, hparams_file, plain, kwargs)
        return super().load_from_checkpoint(checkpoint_path, map_location, hparams_file, strict, plain, **kwargs)

    def configure_model(self) -> None:
        """Read the pretrained weights, once."""
        self.backbone.load()

    def setup(self, stage: str) -> None:
        """Prepare the scoring of the data module's sets, and the accuracy matrix."""
        self.configure_model()
        data = self._data()
        if self.scorer is None or self.scorer.data is not data:
            self.scorer = Scorer(self.backbone, data)
        for name in (*data.stream, *data.controls):
            self.scorer.add(name)
        if self.matrix is None:
            self.matrix = AccuracyMatrix(data.stream.names, data.controls)
        else:
            self._grow_matrix(data.stream.names, data.controls)

    def forward(self, inputs: Any, name: str) -> Any:
        """What the merged model answers on a set.

        Args:
            inputs: of a batch of the set: images ``(N, C, H, W)``, or tokens by name.
            name: of the set.

        Returns:
            Of an image set the cosine of each image with each class, ``(N, classes)``; of a text set the answers.
        """
        return self._scores().add(name)(inputs)

    def configure_optimizers(self) -> None:
        """No optimiser: nothing is trained."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A loss that depends on no parameter, so that Lightning's own bookkeeping runs as in any training."""
        return torch.zeros((), device=self.device, requires_grad=True)

    def on_fit_start(self) -> None:
        """Refuse a merge without the callback that began it, and a trainer that would score all on the first sets."""
        trainer = self.trainer
        left = (trainer.max_epochs or 0) - trainer.current_epoch
        scored = trainer.limit_val_batches != 0 and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if trainer.reload_dataloaders_every_n_epochs != 1 and scored and (left > 1 or trainer.max_epochs == -1):  # type: ignore[attr-defined]
            raise MisconfigurationException(
                "each merge is scored on one more task, so the Trainer must ask for the sets anew after every merge: "
                "give it `reload_dataloaders_every_n_epochs=1`."
            )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        # a merge callback is known by its merger: callbacks import this module, not the other way round
        if self.merged_tasks and not any(hasattr(callback, "merger") for callback in callbacks):
            raise MisconfigurationException(
                f"this module has {len(self.merged_tasks)} tasks merged ({', '.join(self.merged_tasks)}) but the "
                "trainer has no MergeCallback to continue; add the callback that made them."
            )

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count one batch."""
        self._scores().count(self._data().eval_names[dataloader_idx], batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count one batch."""
        self._scores().count(self._data().eval_names[dataloader_idx], batch)

    def on_validation_epoch_end(self) -> None:
        """Turn the counts into accuracies; during ``fit`` enter the matrix row of this merge and log the stream."""
        if self.trainer.sanity_checking:
            self._scores().reset()
            return
        self._finish("val" if self.trainer.state.fn != TrainerFn.FITTING else "fit")

    def on_test_epoch_end(self) -> None:
        """Turn the counts into accuracies."""
        self._finish("test")

    def _finish(self, stage: str) -> None:
        data = self._data()
        accuracies = {}
        for name in data.eval_names:
            accuracies[name], counted = self._scores().take(name)
            self._require_whole(name, counted, len(data.labelled_set(name)), stage)
        tasks = [name for name in data.eval_names if name in data.stream.names]
        if stage == "fit":
            scores = self._enter_row(tasks, accuracies)
            group = "stream"
        else:
            scores = summarise([accuracies[name] for name in tasks], [accuracies[name] for name in data.controls])
            group = stage
        self.last_scores = {**accuracies, **scores}
        named = tag_scores(self.last_scores, tasks, data.controls, group)
        # "step" is what Lightning takes as the x-axis: the number of merged tasks in every mode
        self.log_dict({**named, "step": float(len(self.merged_tasks))}, add_dataloader_idx=False, sync_dist=False)

    def _enter_row(self, tasks: Sequence[str], accuracies: Mapping[str, float]) -> dict[str, float]:
        if list(tasks) != self.merged_tasks:
            raise RuntimeError(f"scored {', '.join(tasks)}, but merged are {', '.join(self.merged_tasks) or 'none'}.")
        matrix = self.matrix
        if matrix is None or not tasks:
            return {}
        matrix.update(len(tasks), accuracies)
        return matrix.defined()

    def _require_whole(self, name: str, counted: int, expected: int, stage: str) -> None:
        """A validation that was cut short must not enter the matrix as if it were whole."""
        trainer = self.trainer
        limit = trainer.limit_test_batches if stage == "test" else trainer.limit_val_batches
        limited = trainer.fast_dev_run or _is_part(limit)  # type: ignore[attr-defined]
        if counted != expected and not limited:
            raise RuntimeError(
                f"only {counted} of {expected} images of '{name}' were scored: this checkpoint was taken inside a "
                "validation; resume from one taken at the end of an epoch."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store what the matrix rows and columns mean."""
        if self.matrix is not None:
            checkpoint["safemerge"] = {
                "merged_tasks": list(self.merged_tasks),
                "tasks": list(self.matrix.tasks),
                "controls": list(self.matrix.controls),
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Prepare a matrix of the size that the checkpoint holds; :meth:`setup` or resuming grows it to the data's."""
        self.configure_model()
        saved = checkpoint.get("safemerge")
        if saved is None:
            return
        current = self.matrix
        self.merged_tasks = list(saved["merged_tasks"])
        state = checkpoint["state_dict"]
        if current is None:
            self.matrix = AccuracyMatrix(saved["tasks"], saved["controls"])
        elif (current.tasks, current.controls) != (tuple(saved["tasks"]), tuple(saved["controls"])):
            grown = _grown(state, saved, current.tasks, current.controls)
            state["matrix.accuracy"], state["matrix.general"] = grown

    def _grow_matrix(self, tasks: Sequence[str], controls: Sequence[str]) -> None:
        old = self.matrix
        if old is None or (old.tasks, old.controls) == (tuple(tasks), tuple(controls)):
            return
        state = {"matrix.accuracy": old.accuracy, "matrix.general": old.general}
        saved = {"merged_tasks": self.merged_tasks, "tasks": old.tasks, "controls": old.controls}
        self.matrix = AccuracyMatrix(tasks, controls)
        self.matrix.accuracy, self.matrix.general = _grown(state, saved, tasks, controls)
        self.matrix._update_count = self.matrix.steps
        self.matrix.to(self.device)

    def _scores(self) -> Scorer:
        if self.scorer is None:
            raise RuntimeError("nothing can be scored yet: `setup` was not called.")
        return self.scorer

    def _data(self) -> StreamDataModule:
        data = getattr(self._trainer, "datamodule", None)
        if not isinstance(data, StreamDataModule):
            raise MisconfigurationException(
                "ContinualMergeModule needs a StreamDataModule (such as ZooData) as the trainer's data module, got "
                f"{type(data).__name__}."
            )
        return data


def _is_part(limit: float) -> bool:
    """Whether a limit of batches leaves some out: the number 1 is one batch, 1.0 is all of them.

    Example:
        >>> _is_part(1), _is_part(1.0), _is_part(0.5)
        (True, False, True)
    """
    return isinstance(limit, int) or limit != 1.0


def _grown(
    state: Mapping[str, Tensor], saved: Mapping[str, Any], tasks: Sequence[str], controls: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """The saved matrix in the shape of a stream with more tasks to come."""
    merged = list(saved["merged_tasks"])
    if list(tasks[: len(merged)]) != merged or list(controls) != list(saved["controls"]):
        raise MisconfigurationException(
            f"the checkpoint merged {', '.join(merged) or 'nothing'} and scored on {', '.join(saved['controls'])}; the "
            f"data now gives {', '.join(tasks[: len(merged)])} and {', '.join(controls)}. Resume with the same "
            "order and control sets; new tasks go at the end."
        )
    count = len(merged)
    accuracy = torch.full((len(tasks), len(tasks)), torch.nan, dtype=torch.float64)
    general = torch.full((len(tasks), len(controls)), torch.nan, dtype=torch.float64)
    accuracy[:count, :count] = state["matrix.accuracy"][:count, :count]
    general[:count] = state["matrix.general"][:count]
    return accuracy, general
