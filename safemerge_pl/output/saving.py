"""Save a merge as a complete model folder, and take it up again."""

import importlib
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from safemerge_pl.architectures.layers import vision_only
from safemerge_pl.checkpoints.fit import require_values
from safemerge_pl.checkpoints.layouts import pieces_of, relaid
from safemerge_pl.checkpoints.open import Checkpoint, CheckpointError, Source, match_names, open_checkpoint
from safemerge_pl.checkpoints.tensors import View
from safemerge_pl.folding.store import LazyTensors
from safemerge_pl.output import folders
from safemerge_pl.output.ledger import LEDGER_FILE, continued, read_ledger
from safemerge_pl.output.model_card import model_card
from safemerge_pl.output.side_files import OutputDtype, copy_side_files, output_notes, side_files
from safemerge_pl.output.weights import TensorSpec, parse_size, tied_names, write_weights

if TYPE_CHECKING:
    from safemerge_pl.merger import ContinualMerger
    from safemerge_pl.methods.base import MergeMethod

__all__ = ["MASTER_FILE", "load_merge", "require_output", "save_merge"]

MASTER_FILE = "merge_master.safetensors"
_log = logging.getLogger(__name__)


def save_merge(
    merger: "ContinualMerger",
    folder: Path,
    *,
    template: Source | None = None,
    dtype: OutputDtype = "same",
    max_shard_size: int | str = "5GB",
    copy_code: bool = False,
) -> None:
    """See :meth:`ContinualMerger.save <safemerge_pl.merger.ContinualMerger.save>`."""
    base = merger.pretrained if template is None else open_checkpoint(template)
    require_output(merger, folder, template=base, dtype=dtype, max_shard_size=max_shard_size)
    parameters, (replaced, merged) = merger.merged_parameters(), _replaced(merger, base)

    def read(name: str) -> Tensor:
        tensor = merged[replaced[name]] if name in replaced else base[name]
        require_values(tensor, name, base.source)
        return tensor

    notes, state = output_notes(base, code=copy_code), merger.state_dict()
    with folders.staged_folder(folder) as staging:
        _require_unchanged(merger, folder)
        stem, most = ("model", max_shard_size) if _shards(base) else ("open_clip_model", sys.maxsize)
        write_weights(staging, stem, _specs(base, dtype), read, most)
        write_weights(staging, Path(MASTER_FILE).stem, _masters(merger), parameters.__getitem__, max_shard_size)
        if base.folder is not None:
            copy_side_files(base.folder, staging, dtype, code=copy_code)
        (staging / "README.md").write_text(model_card(merger, state, base, dtype, notes), encoding="utf-8")
        (staging / LEDGER_FILE).write_text("".join(line + "\n" for line in merger.ledger), encoding="utf-8")
        text = json.dumps(state, indent=1, allow_nan=False)
        (staging / folders.STATE_FILE).write_text(text, encoding="utf-8")  # last: its presence says that all is there
    if merger.saved == folder.resolve() and isinstance(merger._merged, LazyTensors):
        masters = _open_masters(folder)  # what was read from the earlier output when needed is in this one now
        merger._merged = LazyTensors(merger._parameters(), masters.__getitem__)
    merger.saved = folder.resolve()
    for note in notes:
        _log.warning("note: %s", note)


def require_output(
    merger: "ContinualMerger",
    folder: Path,
    *,
    template: Source | None = None,
    dtype: OutputDtype = "same",
    max_shard_size: int | str = "5GB",
) -> None:
    """Refuse what could not be saved: a bad place, too little room, a template of another model.

    Raises:
        CheckpointError: saying what to mend; nothing was written.
    """
    base = merger.pretrained if template is None else open_checkpoint(template)
    parse_size(max_shard_size)
    folders.check_output(folder, () if base.folder is None else (base.folder,))
    _replaced(merger, base)
    needed = sum(spec.size for spec in (*_specs(base, dtype).values(), *_masters(merger).values()))
    if base.folder is not None:
        needed += sum((base.folder / path).stat().st_size for path in side_files(base.folder))
    folders.require_space(folder, needed + 2**20)


def load_merge(
    kind: type["ContinualMerger"],
    folder: Path,
    pretrained: Source,
    *,
    method: "MergeMethod | None" = None,
    options: dict[str, Any],
) -> "ContinualMerger":
    """See :meth:`ContinualMerger.load <safemerge_pl.merger.ContinualMerger.load>`."""
    state = folders.read_state(folder)
    merger = kind(pretrained, method or _rebuild_method(state["method"]), **options)
    while True:
        try:
            merger.load_state_dict(state, _open_masters(folder))
            merger.ledger = continued(read_ledger(folder), merger.ledger)
            break
        except CheckpointError:
            earlier, state = state, folders.read_state(folder)
            if state["reports"] == earlier["reports"]:
                raise  # otherwise it was replaced while it was read: read it again
    merger.saved = folder.resolve()
    return merger


def _open_masters(folder: Path) -> Checkpoint:
    index = folder / f"{MASTER_FILE}.index.json"
    return open_checkpoint(index if index.exists() else folder / MASTER_FILE)


def _specs(base: Checkpoint, dtype: OutputDtype) -> dict[str, TensorSpec]:
    """Shape and dtype of every tensor of the output; integers keep theirs."""
    stored = {name: base.dtype(name) for name in base}
    asked = None if dtype == "same" else getattr(torch, dtype)
    return {
        name: TensorSpec(base.shape(name), asked if asked is not None and kind.is_floating_point else kind)
        for name, kind in stored.items()
    }


def _masters(merger: "ContinualMerger") -> dict[str, TensorSpec]:
    return {name: TensorSpec(merger.pretrained.shape(name), torch.float32) for name in merger._parameters()}


class _Merged(View):
    """All tensors of the merged model, by the pretrained model's names."""

    def __init__(self, merger: "ContinualMerger") -> None:
        super().__init__(merger.pretrained)
        self._parameters = merger.merged_parameters()

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[name] if name in self._parameters else self._under[name]


def _replaced(merger: "ContinualMerger", base: Checkpoint) -> tuple[dict[str, str], Checkpoint]:
    """Names in the output, all names of tied tensors among them -> names in a checkpoint with the merged weights."""
    merged: Checkpoint = _Merged(merger)
    try:
        found = {theirs: name for name, theirs in match_names(merger._parameters(), base).items()}
    except CheckpointError as error:
        found, merged = _in_layout_of(base, merger, merged, error)
    for alias, first in tied_names(base).items():
        name = found.get(first) or found.get(alias)
        if name is not None:
            found |= {alias: name, first: name}
    return found, merged


def _in_layout_of(
    base: Checkpoint, merger: "ContinualMerger", merged: Checkpoint, reason: CheckpointError
) -> tuple[dict[str, str], Checkpoint]:
    """The same for a template in another layout, such as a transformers file for a model that was in memory.

    Raises:
        CheckpointError: the reason why the names do not match, if the template has no such layout.
    """
    units = {unit.name for unit in merger._units()}
    parts = {name: {part.name for part in pieces_of(name, base.shape(name))} & units for name in vision_only(base)}
    wanted = [name for name, found in parts.items() if found]
    other = relaid(base, wanted, merged) if units == set().union(*parts.values()) else None
    if other is None or any(other.shape(name) != base.shape(name) for name in wanted):
        raise reason
    return {name: name for name in wanted}, other


def _require_unchanged(merger: "ContinualMerger", folder: Path) -> None:
    """Refuse to replace an output that somebody else has continued since this merger read or wrote it."""
    if merger.saved != folder.resolve() or not (folder / folders.STATE_FILE).exists():
        return
    there = [report["merged"] for report in folders.read_state(folder)["reports"]]
    if there != [report.merged for report in merger.reports[: len(there)]]:
        raise CheckpointError(
            f"the output {folder} was continued by another process since it was read here; load it again and fold "
            "into that, or name another folder."
        )


def _shards(base: Checkpoint) -> bool:
    """Whether the library that loads the output reads shards; open_clip does not."""
    return base.folder is None or (base.folder / "config.json").exists() or not any(base.folder.glob("open_clip_*"))


def _rebuild_method(saved: dict[str, Any]) -> "MergeMethod":
    """A method of this package from its saved settings; no other module is ever imported by name."""
    module, _, name = saved["class_path"].rpartition(".")
    if not module.startswith("safemerge_pl.methods."):
        raise CheckpointError(f"the merge was made with {saved['class_path']}; pass that method as `method`.")
    method: MergeMethod = getattr(importlib.import_module(module), name)(**saved["init_args"])
    return method
