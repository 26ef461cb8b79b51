"""Fold fine-tuned models, one after another, into one merged model. Pure PyTorch."""

import copy
import functools
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from safemerge_pl.architectures.layers import MergeLayer
from safemerge_pl.checkpoints.differences import Likeness, Mismatch
from safemerge_pl.checkpoints.fit import Fitted, fit
from safemerge_pl.checkpoints.open import Checkpoint, CheckpointError, Source, match_names, open_checkpoint
from safemerge_pl.checkpoints.snapshot import read_finite, take_snapshot
from safemerge_pl.checkpoints.tensors import LazyTensors
from safemerge_pl.checkpoints.values import require_dtype, require_finite
from safemerge_pl.folding.bound import Gauge, MaxResponse
from safemerge_pl.folding.deployment import Deployment, deploy
from safemerge_pl.folding.division import Division
from safemerge_pl.folding.engine import Folding
from safemerge_pl.folding.fates import Taken, add_up
from safemerge_pl.folding.leading import QUICKLY_DECOMPOSED, LeadingDirections
from safemerge_pl.folding.left_out import describe_merge, measure_left, remark
from safemerge_pl.folding.processes import Processes
from safemerge_pl.folding.report import FoldReport, LayerReport, leading_of
from safemerge_pl.folding.selection import plan_merge
from safemerge_pl.folding.store import DiskTensors
from safemerge_pl.methods.base import MergeMethod
from safemerge_pl.methods.safe_merge import SafeMerge
from safemerge_pl.methods.saved import (
    describe_method,
    rebuild_method,
    require_plain_settings,
    require_same_method,
    restore_method,
)
from safemerge_pl.output.ledger import continue_ledger, ledger_line, provenance
from safemerge_pl.output.publish import push_folder
from safemerge_pl.output.saving import read_merge, save_merge
from safemerge_pl.output.side_files import OutputDtype
from safemerge_pl.output.state import STATE_FORMAT, MergeState, explain_reference, require_format
from safemerge_pl.runtime.arithmetic import exact_arithmetic
from safemerge_pl.runtime.disk_cache import CachedTensors
from safemerge_pl.runtime.files import local_path
from safemerge_pl.runtime.names import suggest_options

__all__ = ["ContinualMerger", "FoldReport", "LayerReport"]


@dataclass(frozen=True)
class _Position:
    """Where a merge stands. A fold puts a new one in the place of the old in a single step, which cannot fail.

    Attributes:
        merged: parameters with the whole accumulated vector, float32, in the pretrained layout; those merged so far.
        reports: one per fold.
        ledger: one line of JSON per fold.
    """

    merged: Mapping[str, Tensor] = field(default_factory=dict)
    reports: tuple[FoldReport, ...] = ()
    ledger: tuple[str, ...] = ()

    def close(self) -> None:
        """Remove files that only this position needed."""
        if isinstance(self.merged, DiskTensors):
            self.merged.close()


class ContinualMerger:
    """The merged model and everything needed to fold in the next one.

    Args:
        pretrained: the model that all others were fine-tuned from; never changed. Tensors and modules are copied.
        method: how to merge; SAFE-Merge with its defaults if left out.
        layers: shell-style patterns of the parameters to merge, instead of the built-in choice.
        device: where the arithmetic runs; results stay on the CPU.
        workspace: folder where merged weights wait between two folds instead of in memory, for models that do not fit;
            an earlier merge is read from its own folder then. Files in it are removed when they are replaced.
        on_mismatch: ``"pretrained"`` also takes models of another image size or vocabulary, and keeps the pretrained
            rows of their position tables and embeddings; ``"error"`` refuses them.
        max_response: bounds how strongly the pretrained matrices read what is merged, and so protects what the
            pretrained model knows, whatever the incoming models are and however many there are. The accumulated vector
            is kept whole, and ``scale`` times it is deployed. 0.015 is a careful value, 0.035 a fair one; ``"auto"``
            takes the method's own, ``None`` bounds nothing.
        max_drift: bounds how far features of noise move, which tells what general knowledge was lost whatever was
            merged: 0.01 is a careful value. It needs a ``gauge``, and holds beside ``max_response``.
        gauge: measures the drift with given parameters, such as ``measure`` of a
            :class:`~safemerge_pl.scoring.DriftGauge`, or a :class:`~safemerge_pl.scoring.FileGauge` for a folder.
        processes: among which the work is shared out, see :func:`~safemerge_pl.folding.launch.join_processes`; all of
            them make the same calls. Each reads and holds the parameters that are its own alone.

    Raises:
        CheckpointError: if ``pretrained`` cannot be read or holds NaN or Inf in a layer to merge.
        ValueError: if ``max_response`` or ``max_drift`` is no number above 0, a setting of the method is not finite, or
            there is a ``max_drift`` without a ``gauge`` or over several processes.

    Example:
        >>> layer = "encoder.layers.0.mlp.fc1"
        >>> pretrained = {f"{layer}.weight": torch.eye(4), f"{layer}.bias": torch.ones(4)}
        >>> incoming = {name: tensor + 0.1 for name, tensor in pretrained.items()}
        >>> merger = ContinualMerger(pretrained, method=SafeMerge(keep_ratio=1.0, use_recovery=False))
        >>> report = merger.fold(incoming, task="mnist")
        >>> merger.tasks, report.kept_fraction, merger.merged[f"{layer}.bias"].tolist()
        (['mnist'], 1.0, [1.0, 1.0, 1.0, 1.0])
    """

    @suggest_options
    def __init__(
        self,
        pretrained: Source,
        method: MergeMethod | None = None,
        *,
        layers: str | Sequence[str] | None = None,
        device: str | torch.device = "cpu",
        workspace: str | Path | None = None,
        on_mismatch: Mismatch = "error",
        max_response: MaxResponse = "auto",
        max_drift: float | None = None,
        gauge: Gauge | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.workspace = None if workspace is None else local_path(workspace)
        self.on_mismatch: Mismatch = on_mismatch
        self.method = SafeMerge() if method is None else method
        require_plain_settings(self.method)
        self._deployment = Deployment(self.method, max_response, max_drift, gauge)
        self.plan = plan_merge(take_snapshot(pretrained), self.method, layers)
        self.device = torch.device(device)
        self.processes = Processes(shared=False) if processes is None else processes  # a Trainer may set others
        # called now and then with the task, and the merged and the total number of its weights
        self.progress: Callable[[str, int, int], None] | None = None
        self.saved: Path | None = None  # the output that it was read from or written to last
        self._now = _Position()
        self._caches: dict[tuple[str, ...], CachedTensors] = {}
        self._divided = Division(self.plan, self.method, self.device, self.processes)
        self._leading = LeadingDirections(self.plan.parameters, self.pretrained)
        self.leaves_rest = True  # what is not merged is pretrained; somebody may keep it as trained
        with exact_arithmetic(self.device):
            for name in self.plan.parameters:
                require_dtype(self.pretrained, name)
            own = Likeness(self.plan.units)
            self.reference = self._division.hash(
                lambda name: own.add(name, read_finite(self.pretrained, name).float()), self.processes.apart
            )
        self._lengths = self._division.collect_lengths(own)

    @property
    def pretrained(self) -> Checkpoint:
        """The pretrained model."""
        return self.plan.pretrained

    @property
    def layers(self) -> list[MergeLayer]:
        """Matrices that are merged in stacks."""
        return self.plan.layers

    @property
    def others(self) -> list[MergeLayer]:
        """Tensors that are merged one by one."""
        return self.plan.others

    @property
    def tasks(self) -> list[str]:
        """Names folded so far, in order."""
        return [report.task for report in self._now.reports]

    @property
    def reports(self) -> list[FoldReport]:
        """One report per fold."""
        return list(self._now.reports)

    @property
    def ledger(self) -> list[str]:
        """One line of JSON per fold."""
        return list(self._now.ledger)

    @property
    def max_response(self) -> float | None:
        """The bound on the response that holds; ``None`` for none."""
        return self._deployment.max_response

    @property
    def max_drift(self) -> float | None:
        """The bound on the drift that holds; ``None`` for none."""
        return self._deployment.max_drift

    @property
    def scale(self) -> float:
        """Share of the accumulated vector that is deployed: 1 unless ``max_response`` bounds it."""
        return self._now.reports[-1].scale if self._now.reports else 1.0

    @property
    def merged(self) -> dict[str, Tensor]:
        """Copies of all merged parameters in float32, by the pretrained model's names; buffers as they are."""
        parameters, first = self.merged_parameters(), self.plan.aliases
        tensors = {
            name: parameters[first.get(name, name)] if first.get(name, name) in parameters else self.pretrained[name]
            for name in self.pretrained
        }
        return {
            name: tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
            for name, tensor in tensors.items()
        }

    def merged_parameters(self) -> Mapping[str, Tensor]:
        """Those parameters that the method merges, as deployed, float32; not copies: do not change them."""
        return self._give(deploy(self.pretrained, self._current, self.scale))

    def parameters_at(self, max_response: float | None) -> Mapping[str, Tensor]:
        """The same with another bound, to see what that would deploy; nothing changes.

        Args:
            max_response: the other bound, ``None`` for the whole accumulated vector.

        Raises:
            ValueError: if it is no number above 0.

        Example:
            >>> base = {"encoder.layers.0.mlp.fc1.weight": torch.eye(2)}
            >>> merger = ContinualMerger(base, SafeMerge(keep_ratio=1.0, use_recovery=False))
            >>> _ = merger.fold({name: 2 * tensor for name, tensor in base.items()}, "double")
            >>> merger.parameters_at(0.25)["encoder.layers.0.mlp.fc1.weight"].tolist()
            [[1.25, 0.0], [0.0, 1.25]]
        """
        with exact_arithmetic(self.device):
            deployed = self._deployment.at(max_response, self._current, self._division)
        return self._give(deployed)

    def accumulated_parameters(self) -> Mapping[str, Tensor]:
        """The same with the whole accumulated vector, which the next fold adds to."""
        return self._give(self._current)

    def _give(self, read: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        found = LazyTensors(self.plan.parameters, read)
        return dict(found) if self.workspace is None and not self.processes.apart else found

    def fingerprint(self) -> str:
        """SHA-256 of the merged layers as deployed, in float32, the same for every library that stores the model."""
        return self._now.reports[-1].merged if self._now.reports else self.reference

    def __str__(self) -> str:
        """What is merged into what, in a few sentences."""
        return describe_merge(self.plan, self.method.label, self._now.reports)

    def fold(self, incoming: Source, task: str) -> FoldReport:
        """Merge one more model, wholly or not at all.

        Args:
            incoming: a model fine-tuned from the same pretrained one, in any form that ``pretrained`` can have.
            task: its name, not used before.

        Returns:
            What was done, layer by layer.

        Raises:
            CheckpointError: if the incoming model does not fit; nothing has changed then.
        """
        self._deployment.require_possible(self._division)
        start, before = time.perf_counter(), self._now
        state = copy.deepcopy(self.method.state_dict())
        try:
            with exact_arithmetic(self.device):
                fitted, hashed, likeness = self._examine(incoming, task)
                left = self._measure_left(fitted)
                folding = self._folding(fitted, task)
                staged = self.processes.agree(self._room)
                folding.run(staged)
                response, scale, drift = self._deployment.measure(staged, self._division)
                merged = self._division.hash(
                    deploy(self.pretrained, staged.__getitem__, scale), self.processes.count > 1
                )
                rows = [folding.rows[layer.name] for layer in self.plan.units]
                strange = likeness.notes(self._lengths, {row.layer: row.task_norm for row in rows})
                shares, leading = add_up(self._taken(rows), left), leading_of(rows)
                report = FoldReport(
                    task=task,
                    index=len(before.reports) + 1,
                    source=fitted.source,
                    incoming=hashed,
                    merged=merged,
                    seconds=time.perf_counter() - start,
                    solve_seconds=folding.solve_seconds,
                    kept_fraction=self._kept_fraction(rows),
                    losses=tuple(folding.losses),
                    layers=tuple(rows),
                    notes=(
                        *self._notes(fitted, rows, hashed),
                        *strange,
                        *folding.notes,
                        *remark(left, shares, leading, [report.leading for report in before.reports]),
                    ),
                    response=response,
                    scale=scale,
                    drift=drift,
                    shares=shares,
                    leading=leading,
                    **provenance(fitted),
                )
                line = self.processes.agree(lambda: self._ledger_line(report))
                self._division.spread(staged)
            # all that can fail is done: from here on the merge has the task, report and ledger line included
            self._now = _Position(staged, (*before.reports, report), (*before.ledger, line))
        except BaseException as error:
            if self._now is before:
                self.method.load_state_dict(state)
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"task '{task}': {error}") from error
            raise
        before.close()
        return report

    def check(self, incoming: Source, task: str, *, values: bool = True) -> Fitted:
        """See whether a model could be folded, without changing anything.

        Args:
            incoming: as for :meth:`fold`.
            task: as for :meth:`fold`.
            values: also read the tensors and look for NaN and Inf; otherwise headers only.

        Returns:
            The parameters to merge, as the incoming model has them; :meth:`fold` takes it, and matches no name again.

        Raises:
            CheckpointError: if it does not fit.
        """
        if task.casefold() in (name.casefold() for name in self.tasks):
            raise CheckpointError(f"a task of the name '{task}' is already merged; give another name.")
        opened, parameters = open_checkpoint(incoming), self.plan.parameters
        return fit(self.pretrained, parameters, opened, values=values, on_mismatch=self.on_mismatch)

    def save(
        self,
        folder: str | Path,
        *,
        template: Source | None = None,
        dtype: OutputDtype = "same",
        max_shard_size: int | str = "5GB",
        copy_code: bool = False,
        scores: Mapping[str, float] | None = None,
    ) -> Path:
        """Write a complete model folder: weights, the base's other files, state, ledger, and a model card.

        Args:
            folder: new, empty, or holding an earlier merge, which is replaced in one step.
            template: checkpoint whose tensors and files complete the folder; the pretrained model if left out. Its
                names may have other prefixes than those of ``pretrained``, or be those of the library's files for a
                model that was given in memory.
            dtype: dtype of the written weights. Masters in float32 are always kept beside, so that small updates
                survive a long stream.
            max_shard_size: weights above this size are written in shards, with an index.
            copy_code: also copy the model's own Python files, which some models need to be loaded. They are never run
                here.
            scores: of the merge as it is, by set, in [0, 1], for the model card.

        Returns:
            The folder.

        Raises:
            CheckpointError: if the folder cannot be used or written; what was there stays as it was.
        """
        place = local_path(folder)
        state = MergeState(
            plan=self.plan,
            merged=self.merged_parameters(),
            masters=self.accumulated_parameters(),
            values=self.state_dict(),
            reports=tuple(self.reports),
            ledger=tuple(self.ledger),
            label=self.method.label,
            saved=self.saved,
            processes=self.processes if self.processes.apart else Processes(shared=False),
            owners=self._division.owners if self.processes.apart else dict.fromkeys(self.pretrained, 0),
            scores=scores or {},
        )
        options: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size, "copy_code": copy_code}
        written = save_merge(state, place, template=template, **options)
        if self.processes.apart or (self.saved == place.resolve() and isinstance(self._now.merged, LazyTensors)):
            masters = written.masters()  # also of other processes, and what was read from an earlier output
            before, self._now = (
                self._now,
                replace(self._now, merged=LazyTensors(self.plan.parameters, masters.__getitem__)),
            )
            before.close()
        self.saved = place.resolve()
        return place

    def push_to_hub(self, repo: str, *, private: bool = True, message: str | None = None) -> str:
        """Put the folder that was saved last on the hub, file by file as it lies on disk.

        Args:
            repo: ``owner/name``: new, empty, or holding an earlier merge, which is replaced in one commit.
            private: whether nobody else sees it when it is made; the visibility of one that is there stays.
            message: of the commit; the tasks if left out.

        Returns:
            Its address.

        Raises:
            CheckpointError: if nothing was saved since the last fold, or the hub does not take it.
        """
        saved = [] if self.saved is None else read_merge(self.saved).values["reports"]
        if self.saved is None or [report.get("merged") for report in saved] != [each.merged for each in self.reports]:
            raise CheckpointError(f"the merge is not saved as it is, so it cannot be put into {repo}: `save` it first.")
        return push_folder(self.saved, repo, private=private, message=message or f"Merge {', '.join(self.tasks)}")

    @classmethod
    def load(
        cls, folder: str | Path, pretrained: Source, *, method: MergeMethod | None = None, **options: Any
    ) -> "ContinualMerger":
        """Continue a saved merge, bit-identical to not having stopped.

        Args:
            folder: written by :meth:`save`.
            pretrained: the same pretrained model as then.
            method: the same method as then; rebuilt from the saved settings if left out.
            options: others of the constructor; ``layers`` the same as then. ``max_response`` and ``max_drift`` are
                those of then if they are left out; the latter needs its ``gauge``.

        Raises:
            CheckpointError: if the folder is no saved merge, or pretrained model or method are not those of then.
        """
        saved = read_merge(local_path(folder))
        options["max_response"], drift = saved.bounds(options.get("max_response", "auto"))
        if drift is not None and options.setdefault("max_drift", drift) == drift and options.get("gauge") is None:
            raise CheckpointError(
                f"{folder} was merged with `max_drift` {drift}: give the `gauge` that measures it, such as a "
                "safemerge_pl.scoring.FileGauge of the pretrained folder."
            )
        merger = cls(pretrained, method or rebuild_method(saved.values["method"]), **options)
        merger.restore(folder)
        return merger

    def restore(self, folder: str | Path) -> None:
        """Take up a saved merge of the same pretrained model with the same method.

        Args:
            folder: written by :meth:`save`.

        Raises:
            CheckpointError: if the folder is no saved merge, or pretrained model or method are not those of then.
        """
        saved = read_merge(local_path(folder))
        while True:
            try:
                self.load_state_dict(saved.values, saved.masters())
                self._now = replace(self._now, ledger=tuple(continue_ledger(saved.ledger(), self._now.ledger)))
                break
            except CheckpointError:
                earlier, saved = saved, read_merge(local_path(folder))
                if saved.values["reports"] == earlier.values["reports"]:
                    raise  # otherwise it was replaced while it was read: read it again
        self.saved = local_path(folder).resolve()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights, as plain values: tasks and reports, method, hashes."""
        return {
            "format": STATE_FORMAT,
            "tasks": self.tasks,
            "reference": self.reference,
            "merged": self.fingerprint()  # of the masters
            if self.scale == 1.0
            else self._division.hash(self._current, self.processes.apart),
            **self._deployment.settings(),
            "method": describe_method(self.method),
            "reports": [asdict(report) for report in self.reports],
        }

    def load_state_dict(self, state: dict[str, Any], weights: Source) -> None:
        """Take up a saved state with its merged weights.

        Raises:
            CheckpointError: if the state belongs to another pretrained model, method or other weights.
        """
        require_format(state.get("format"), "the saved state")
        require_same_method(self.method, state.get("method", {}))
        if state.get("reference") != self.reference:
            units = [unit.name for unit in self.plan.units]
            raise CheckpointError(explain_reference(state, units, self.pretrained.source, self.reference))
        self._deployment.require_same(state)
        checkpoint = open_checkpoint(weights)
        names = match_names(self.plan.parameters, checkpoint, self.pretrained)
        own = [name for name in names if self._division.is_own(name)]
        merged: Mapping[str, Tensor] = LazyTensors(own, lambda name: checkpoint[names[name]].detach().float().cpu())
        if self.workspace is None:
            merged = {name: tensor.clone() for name, tensor in merged.items()}
        if self._division.hash(merged.__getitem__, self.processes.apart) != state.get("merged"):
            raise CheckpointError(
                f"{checkpoint.source}: the merged weights are not those that the state was saved with."
            )
        try:
            reports = tuple(FoldReport.from_dict(report) for report in state["reports"])
            lines = tuple(self._ledger_line(report) for report in reports)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the reports of the saved merge are damaged ({type(error).__name__}: {error}); fold again from the "
                "last whole output."
            ) from error
        restore_method(self.method, state.get("method", {}))
        before, self._now = self._now, _Position(merged, reports, lines)
        before.close()

    def _ledger_line(self, report: FoldReport) -> str:
        return ledger_line(report, self.method.label, self.method.settings())

    @property
    def _division(self) -> Division:
        """How the work is shared out; anew once a Trainer has set other processes or another device."""
        if not self._divided.is_of(self.processes, self.device):
            self._divided = Division(self.plan, self.method, self.device, self.processes)
        return self._divided

    def _current(self, name: str) -> Tensor:
        """A parameter with the whole accumulated vector."""
        merged = self._now.merged.get(name)
        if merged is None and self._now.reports and not self._division.is_own(name):
            raise RuntimeError(f"`{name}` is merged by another process; save the merge and read it from there.")
        return self.pretrained[name].float() if merged is None else merged

    def _measure_left(self, incoming: Fitted) -> dict[str, float]:
        """What of the incoming model is not merged at all."""
        if not self.leaves_rest:
            return {}
        return measure_left(incoming, self.pretrained, self.processes, self._division.owners)

    def _kept_fraction(self, rows: Sequence[LayerReport]) -> float:
        """Share of all entries that were merged."""
        entries = [layer.entries for layer in self.plan.units]
        return sum(row.kept_fraction * size for row, size in zip(rows, entries, strict=True)) / sum(entries)

    def _taken(self, rows: Sequence[LayerReport]) -> Iterator[Taken]:
        for layer, row in zip(self.plan.units, rows, strict=True):
            merged = 1.0 if row.taken is None else row.taken
            yield Taken(layer.parameter, row.task_norm**2, merged, row.recovered or 0.0)

    def _counts(self) -> dict[str, int]:
        """How many tasks have changed each layer so far."""
        return Counter(row.layer for report in self._now.reports for row in report.layers if row.task_norm)

    def _examine(self, incoming: Source, task: str) -> tuple[Fitted, str, Likeness]:
        """Everything that can be wrong with a model is found here, before the work; its fingerprint and its lengths."""
        fitted = self.processes.agree(lambda: self._check_changed(incoming, task))
        likeness = Likeness(self.plan.units)

        def read(name: str) -> Tensor:
            tensor = fitted[name]
            require_finite(tensor, fitted.names[name], fitted.source)
            return likeness.add(name, tensor)

        if self.processes.apart:
            hashed = self._division.hash(read, together=True)
        else:  # in training the models are equal, which whoever trains sees by this very hash
            hashed = self.processes.agree(lambda: self._division.hash(read, together=False))
        likeness.lengths = self._division.collect_lengths(likeness)
        return fitted, hashed, likeness

    def _check_changed(self, incoming: Source, task: str) -> Fitted:
        fitted = self.check(incoming, task, values=False)
        fitted.require_change()
        return fitted

    def _folding(self, incoming: Fitted, task: str) -> Folding:
        quick = self.method.scope != "none" or self._leading.width <= QUICKLY_DECOMPOSED
        return Folding(
            method=self.method,
            index=len(self._now.reports) + 1,
            counts=self._counts(),
            layers=self.layers,
            others=self.others,
            pretrained=self.pretrained,
            current=self._current,
            incoming=incoming,
            device=self.device,
            processes=self.processes,
            owners=self._division.owners,
            reference=self.reference,
            caches=self._caches,
            # the directions of an adapter are those that it began with
            leading=self._leading if quick and not incoming.is_adapter else None,
            on_progress=functools.partial(self.progress or (lambda *_: None), task),
        )

    def _room(self) -> MutableMapping[str, Tensor]:
        """Where the next merged weights go until they are whole."""
        if self.workspace is None:
            return {}
        folder = self.workspace / str(len(self._now.reports) + 1)
        shutil.rmtree(folder, ignore_errors=True)  # of a fold that failed
        return DiskTensors(folder)

    def _notes(self, checkpoint: Checkpoint, rows: list[LayerReport], hashed: str) -> Iterator[str]:
        yield from (
            checkpoint.notes if self._now.reports else (*self.pretrained.notes, *self.plan.notes, *checkpoint.notes)
        )
        if not any(row.task_norm for row in rows):
            yield "its merged layers equal the pretrained model's: nothing was added"
        for earlier in self._now.reports:
            if earlier.incoming == hashed:
                yield f"the same weights were folded before, as '{earlier.task}'"
