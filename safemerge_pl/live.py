"""Fold a module into a merge while it is being trained, task after task. Pure PyTorch."""

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from safemerge_pl.architectures.layers import MergeLayer
from safemerge_pl.checkpoints.adapter_modules import adapter_deltas, adapter_names, plain_name
from safemerge_pl.checkpoints.module_weights import holds_exactly, read_for_module
from safemerge_pl.checkpoints.open import Checkpoint, CheckpointError, Source, fingerprint, open_checkpoint
from safemerge_pl.checkpoints.tensors import LazyTensors, View
from safemerge_pl.folding.bound import MaxResponse
from safemerge_pl.folding.processes import Processes
from safemerge_pl.folding.reparametrised import refuse_computed, refuse_missing
from safemerge_pl.folding.selection import MergePlan
from safemerge_pl.merger import ContinualMerger, FoldReport
from safemerge_pl.methods import MergeMethod, SafeMerge
from safemerge_pl.methods.saved import rebuild_method
from safemerge_pl.output.saving import read_merge
from safemerge_pl.runtime.files import local_path
from safemerge_pl.runtime.names import suggest_options

__all__ = ["LiveMerger", "Rest", "RestartFrom", "require_choices"]

RestartFrom = Literal["pretrained", "merged"]
Rest = Literal["pretrained", "keep"]


class LiveMerger:
    """A merge whose incoming models are trained in one module, one task after the other.

    The module's weights when this is made are the pretrained ones. After each task :meth:`fold_trained` merges what was
    trained and leaves the merged weights in the module, to be scored and saved; :meth:`restart` puts the pretrained
    weights back for the next task (take a fresh optimiser then). All writing is in place: parameters keep their
    identity. A module trained with LoRA adapters (peft) is folded as its dense equivalent, and the adapters start anew.

    Args:
        module: the module, or the part of it, that is merged; leave classification heads outside.
        method: how to merge; SAFE-Merge with its defaults if left out.
        layers: shell-style patterns of the parameters to merge, instead of the built-in choice.
        device: where the arithmetic runs; pretrained and merged weights are kept on the CPU.
        pretrained: the pretrained weights, for a module that no longer holds them.
        restart_from: what each task starts from. ``"pretrained"`` is the paper's setting; with ``"merged"`` a task
            vector is what the task's own training changed.
        rest: what becomes of the module's tensors that are not merged: ``"pretrained"`` puts them back at every
            boundary, as in the paper; ``"keep"`` leaves them as trained last.
        max_response: bounds what is deployed, see :class:`~safemerge_pl.merger.ContinualMerger`.

    Attributes:
        module: the module.
        merger: the merge itself, which knows nothing of the module.
        restart_from: see above.
        rest: see above.

    Raises:
        CheckpointError: if the module cannot be merged, holds adapters other than plain LoRA, or computes what would be
            merged from other tensors (pruning, parametrisation).

    Example:
        >>> from safemerge_pl import SafeMerge
        >>> module = nn.Sequential(nn.Linear(2, 2, bias=False))
        >>> base = module[0].weight.detach().clone()
        >>> merger = LiveMerger(module, SafeMerge(keep_ratio=1.0, use_recovery=False), layers=["*weight"])
        >>> for task in ("a", "b"):
        ...     merger.restart()
        ...     _ = module[0].weight.data.add_(0.5)  # training
        ...     _ = merger.fold_trained(task)
        >>> torch.allclose(module[0].weight, base + 1.0)
        True
    """

    @suggest_options
    def __init__(
        self,
        module: nn.Module,
        method: MergeMethod | None = None,
        *,
        layers: str | Sequence[str] | None = None,
        device: str | torch.device = "cpu",
        pretrained: Source | None = None,
        restart_from: RestartFrom = "pretrained",
        rest: Rest = "pretrained",
        max_response: MaxResponse = "auto",
    ) -> None:
        require_choices(restart_from, rest)
        self.module, self.restart_from, self.rest = module, restart_from, rest
        self._origin = pretrained if isinstance(pretrained, (str, Path)) else None
        refuse_computed(module, SafeMerge() if method is None else method, layers)
        adapters = adapter_names(module)
        tensors = {name: tensor for name, tensor in self._tensors().items() if name not in adapters}
        self._adapters = {name: self._tensors()[name].detach().cpu().clone() for name in sorted(adapters)}
        if any(delta.any() for delta in adapter_deltas(module).values()):
            raise CheckpointError(
                "the LoRA adapters are not zero at the start: they are trained already, or not initialised to zero; "
                "start from fresh adapters with `init_lora_weights=True`."
            )
        if pretrained is not None:
            tensors |= read_for_module(module, tensors, pretrained)
        self.merger = ContinualMerger(tensors, method, layers=layers, device=device, max_response=max_response)
        self.merger.leaves_rest = rest == "pretrained"
        if pretrained is None:
            self.pretrained.source = f"the {type(module).__name__} before training"
        normalised = [name for name, part in module.named_modules() if _has_statistics(part)]
        if normalised:
            fate = "are put back to the pretrained ones" if rest == "pretrained" else "stay those of the last task"
            warnings.warn(
                f"{len(normalised)} BatchNorm layers (first `{normalised[0]}`): running statistics are not merged and "
                f"{fate}; if you have data, renew them with torch.optim.swa_utils.update_bn.",
                stacklevel=2,
            )

    def __str__(self) -> str:
        """What is merged into what, in a few sentences."""
        return str(self.merger)

    @property
    def plan(self) -> MergePlan:
        """What is merged of the module."""
        return self.merger.plan

    @property
    def pretrained(self) -> Checkpoint:
        """The pretrained weights, by the names that the module's tensors have without adapters around them."""
        return self.merger.pretrained

    @property
    def layers(self) -> list[MergeLayer]:
        """Matrices that are merged in stacks."""
        return self.merger.layers

    @property
    def others(self) -> list[MergeLayer]:
        """Tensors that are merged one by one."""
        return self.merger.others

    @property
    def method(self) -> MergeMethod:
        """How to merge."""
        return self.merger.method

    @property
    def max_response(self) -> float | None:
        """Bound on the response of what is merged, ``None`` where there is none."""
        return self.merger.max_response

    @property
    def scale(self) -> float:
        """Share of the accumulated vector that is deployed."""
        return self.merger.scale

    @property
    def tasks(self) -> list[str]:
        """Names folded so far, in order."""
        return self.merger.tasks

    @property
    def reports(self) -> list[FoldReport]:
        """One report per fold."""
        return self.merger.reports

    @property
    def merged(self) -> dict[str, Tensor]:
        """Copies of all merged parameters in float32, see :attr:`ContinualMerger.merged`."""
        return self.merger.merged

    @property
    def device(self) -> torch.device:
        """Where the arithmetic runs."""
        return self.merger.device

    @device.setter
    def device(self, device: torch.device) -> None:
        self.merger.device = device

    @property
    def processes(self) -> Processes:
        """Among which the work is shared out."""
        return self.merger.processes

    @processes.setter
    def processes(self, processes: Processes) -> None:
        self.merger.processes = processes

    @property
    def progress(self) -> Callable[[str, int, int], None] | None:
        """Called now and then with the task, and the merged and the total number of its weights."""
        return self.merger.progress

    @progress.setter
    def progress(self, progress: Callable[[str, int, int], None] | None) -> None:
        self.merger.progress = progress

    def merged_parameters(self) -> Mapping[str, Tensor]:
        """Those parameters that the method merges, float32; not copies: do not change them."""
        return self.merger.merged_parameters()

    def fingerprint(self) -> str:
        """SHA-256 of the merged layers in float32, see :meth:`ContinualMerger.fingerprint`."""
        return self.merger.fingerprint()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights, as plain values, see :meth:`ContinualMerger.state_dict`."""
        return self.merger.state_dict()

    def fold(self, incoming: Source, task: str) -> FoldReport:
        """Merge a model that was trained elsewhere, and leave the merged weights in the module.

        Args:
            incoming: a model fine-tuned from the pretrained one, see :meth:`ContinualMerger.fold`.
            task: its name, not used before.

        Raises:
            CheckpointError: if it does not fit; nothing has changed then.
        """
        self._require_tensors()
        report = self.merger.fold(incoming, task)
        self.apply_merged()
        return report

    def fold_trained(self, task: str, source: str = "") -> FoldReport:
        """Merge what the module holds now, and leave the merged weights in it.

        Args:
            task: its name, not used before.
            source: where the weights came from, for the report.

        Raises:
            CheckpointError: if they cannot be merged (NaN after a diverged training); nothing has changed then.
        """
        incoming = open_checkpoint(self._trained())
        incoming.source = source or f"the {type(self.module).__name__} in training"
        return self.fold(incoming, task)

    def apply_merged(self) -> None:
        """Put the merged weights into the module."""
        self._write(self.merged_parameters())

    def restart(self) -> None:
        """Put the weights into the module that the next task starts from."""
        if self.restart_from == "merged":
            self.apply_merged()
        else:
            self._write({name: self.pretrained[name] for name in self.plan.parameters})

    def is_at_start(self) -> bool:
        """Whether the module holds what it held when this was made, adapters included, and nothing more."""
        return holds_exactly(self.module, {**self.pretrained, **self._adapters})

    def attach(self, module: nn.Module) -> None:
        """Go on with another module of the same architecture.

        Raises:
            CheckpointError: if its tensors have other names or shapes.
        """
        before, self.module = self.module, module
        expected = {name: self.pretrained.shape(name) for name in self.pretrained}
        expected |= {name: tuple(tensor.shape) for name, tensor in self._adapters.items()}
        found = {name: tuple(tensor.shape) for name, tensor in self._tensors().items()}
        if found != expected:
            self.module = before
            odd = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
            raise CheckpointError(
                f"the {type(module).__name__} is not the one that the merge began with: `{odd[0]}` has shape "
                f"{found.get(odd[0], 'none')} now and {expected.get(odd[0], 'none')} then."
            )

    def training_state(self) -> dict[str, Any]:
        """Everything needed to continue, as plain values and tensors; not the pretrained weights, only their hash."""
        return {
            "merger": self.state_dict(),
            "merged": dict(self.merger.accumulated_parameters()) if self.tasks else {},
            "adapters": dict(self._adapters),
            "rest": self._rest_hash(),
            "settings": {"restart_from": self.restart_from, "rest": self.rest},
        }

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Take up a state of :meth:`training_state`.

        Raises:
            CheckpointError: if it belongs to another pretrained model, method or other settings.
        """
        mine = {"restart_from": self.restart_from, "rest": self.rest}
        for key, value in state["settings"].items():
            if mine[key] != value:
                raise CheckpointError(f"the merge was made with {key}={value!r}, not {mine[key]!r}; use the same.")
        weights = state["merged"] or {name: self.pretrained[name] for name in self.plan.parameters}
        self.merger.load_state_dict(state["merger"], weights)
        if state["rest"] != self._rest_hash():
            raise CheckpointError(
                "tensors that are not merged started from other values than now; begin from the same pretrained "
                "weights (seed the module's construction, or keep what is random outside of what is merged)."
            )
        self._adapters = {name: tensor.clone() for name, tensor in state["adapters"].items()}

    def save(self, folder: str | Path, *, template: Source | None = None, **options: Any) -> Path:
        """Write a complete model folder, see :meth:`ContinualMerger.save`.

        The other files come from ``template``, by default the ``pretrained`` that was given; without either, the
        configuration of a transformers model is written beside the weights.
        """
        template = self._origin if template is None else template
        config = getattr(self.module, "config", None)
        if template is not None or not hasattr(config, "save_pretrained"):
            return self.merger.save(folder, template=template, **options)
        with tempfile.TemporaryDirectory() as files:
            config.save_pretrained(files)  # type: ignore[union-attr]
            return self.merger.save(folder, template=_WithFiles(self.pretrained, Path(files)), **options)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        module: nn.Module,
        *,
        method: MergeMethod | None = None,
        pretrained: Source | None = None,
        **options: Any,
    ) -> "LiveMerger":
        """Continue a saved merge in a module; nothing is written into it yet, see :meth:`apply_merged`.

        Args:
            folder: written by :meth:`save`.
            module: as in the constructor.
            method: the same method as then; rebuilt from the saved settings if left out.
            pretrained: the pretrained weights, for a module that no longer holds them.
            options: others of the constructor; ``layers`` the same as then.

        Raises:
            CheckpointError: if the folder is no saved merge, or pretrained model or method are not those of then.
        """
        saved = read_merge(local_path(folder))
        options["max_response"], drift = saved.bounds(options.get("max_response", "auto"))
        if drift is not None:
            raise CheckpointError(
                f"{folder} was merged with `max_drift` {drift}, which holds for checkpoints alone: go on with "
                "`safemerge fold`, or start a merge that is bounded by `max_response`."
            )
        merger = cls(module, method or rebuild_method(saved.values["method"]), pretrained=pretrained, **options)
        merger.merger.restore(folder)
        return merger

    def _tensors(self) -> dict[str, Tensor]:
        """The module's own tensors, by the names that they have without adapters around them."""
        return {plain_name(name): tensor for name, tensor in self.module.state_dict(keep_vars=True).items()}

    @torch.no_grad()
    def _trained(self) -> dict[str, Tensor]:
        """Copies on the CPU of what is merged, with adapters added."""
        self._require_tensors()
        tensors, deltas = self._tensors(), adapter_deltas(self.module)
        found = {name: tensors[name].detach().cpu() for name in self.plan.parameters}
        found |= {name: found[name].float() + delta.float().cpu() for name, delta in deltas.items() if name in found}
        lost = sorted(name for name, delta in deltas.items() if name not in found and delta.any())
        if lost:
            warnings.warn(
                f"{len(lost)} trained LoRA adapters are on layers that are not merged, first `{lost[0]}`; their "
                "training is lost. Choose `target_modules` among the merged layers, or name them with `layers`.",
                stacklevel=3,
            )
        if self.restart_from == "merged" and self.tasks:
            current = self.merged_parameters()
            found = {name: self.pretrained[name].float() + (new.float() - current[name]) for name, new in found.items()}
        return {name: tensor.clone() for name, tensor in found.items()}

    def _write(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy weights into the module; all else by ``rest``, except for adapters, which always start anew."""
        rest = dict(self._adapters)
        if self.rest == "pretrained":
            rest |= {name: self.pretrained[name] for name in self.pretrained}
        self._require_tensors()
        tensors = self._tensors()
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in {**rest, **parameters}.items():
                if name not in self.plan.aliases:
                    tensors[name].copy_(tensor)

    def _require_tensors(self) -> None:
        """See that everything that is read and written is still there, and not computed from other tensors by now."""
        refuse_missing(self.module, [*self.pretrained, *self._adapters], list(self._tensors()))

    def _rest_hash(self) -> str:
        merged = {*self.plan.parameters, *self.plan.aliases}
        names = [name for name in self.pretrained if name not in merged]
        return fingerprint(LazyTensors(names, self.pretrained.__getitem__))


class _WithFiles(View):
    """A model in memory, completed by the files of a folder."""

    def __init__(self, under: Checkpoint, folder: Path) -> None:
        super().__init__(under)
        self.folder = folder

    def storage(self, name: str) -> int | None:
        """See :class:`Checkpoint`."""
        return self._under.storage(name)


def require_choices(restart_from: str = "pretrained", rest: str = "pretrained") -> None:
    """Refuse an unknown policy.

    Raises:
        ValueError: naming the option and its values.
    """
    if restart_from not in get_args(RestartFrom):
        raise ValueError(f"`restart_from` must be 'pretrained' or 'merged', got {restart_from!r}.")
    if rest not in get_args(Rest):
        raise ValueError(f"`rest` must be 'pretrained' or 'keep', got {rest!r}.")


def _has_statistics(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) and part.track_running_stats
