"""Save a merge as a complete model folder, and find it again."""

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from safemerge_pl.architectures.layers import counterparts
from safemerge_pl.architectures.pieces import pieces_of
from safemerge_pl.checkpoints.common_names import respell
from safemerge_pl.checkpoints.layouts import convert_layout
from safemerge_pl.checkpoints.open import Checkpoint, CheckpointError, Source, match_names, open_checkpoint
from safemerge_pl.checkpoints.tensors import View, is_floating, tied_names
from safemerge_pl.checkpoints.values import require_values
from safemerge_pl.folding.selection import MergePlan
from safemerge_pl.folding.shares import deal_out
from safemerge_pl.output.files import CARD_FILE, LEDGER_FILE, MASTER_FILE, STATE_FILE
from safemerge_pl.output.folders import check_output, recover_output, require_space, staged_together
from safemerge_pl.output.loaders import find_loader
from safemerge_pl.output.model_card import model_card
from safemerge_pl.output.side_files import OutputDtype, copy_side_files, output_notes, side_files
from safemerge_pl.output.state import MergeState, SavedMerge, read_state
from safemerge_pl.output.weights import TensorSpec, parse_size, write_weights

__all__ = ["output_size", "read_merge", "require_output", "save_merge"]

_log = logging.getLogger(__name__)


def save_merge(
    state: MergeState,
    folder: Path,
    *,
    template: Source | None = None,
    dtype: OutputDtype = "same",
    max_shard_size: int | str = "5GB",
    copy_code: bool = False,
) -> SavedMerge:
    """Write a complete model folder, wholly or not at all.

    Args:
        state: the merge.
        folder: new, empty, or holding an earlier merge, which is replaced in one step.
        template: checkpoint whose tensors and files complete the folder; the pretrained model if left out.
        dtype: of the written weights.
        max_shard_size: weights above this size are written in shards, with an index.
        copy_code: also copy the model's own Python files.

    Returns:
        What is in the folder now.

    Raises:
        CheckpointError: if the folder cannot be used or written; what was there stays as it was.
    """
    plan, processes = state.plan, state.processes
    base = plan.pretrained if template is None else open_checkpoint(template)
    processes.lead(lambda: require_output(plan, folder, template=base, dtype=dtype, max_shard_size=max_shard_size))
    names, merged = _find_merged(plan, base, state.merged)
    specs = _specs(base, dtype)
    owners = _writers(state, base, names, specs)

    def read(name: str) -> Tensor:
        tensor = merged[names[name]] if name in names else base[name]
        require_values(tensor, name, base.source)
        return tensor

    loader = find_loader(base, code=copy_code)
    notes = processes.agree(lambda: [] if processes.rank else output_notes(base, code=copy_code))

    def write_rest(staging: Path) -> None:
        if base.folder is not None:
            copy_side_files(base.folder, staging, dtype, code=copy_code)
        card = model_card(state, base, dtype, notes, loader)
        # a path of bytes that are no text must not stop the merge of what lies there
        (staging / CARD_FILE).write_text(card, encoding="utf-8", errors="backslashreplace")
        (staging / LEDGER_FILE).write_text("".join(line + "\n" for line in state.ledger), encoding="utf-8")
        text = json.dumps(state.values, indent=1, allow_nan=False)
        (staging / STATE_FILE).write_text(text, encoding="utf-8")  # last: its presence says that all is there

    with staged_together(folder, processes) as staging:
        processes.lead(lambda: _require_unchanged(state, folder))
        most = max_shard_size if loader.shards else sys.maxsize
        write_weights(staging, loader.stem, specs, read, most, processes=processes, owners=owners)
        stem, masters, masters_of = Path(MASTER_FILE).stem, state.masters.__getitem__, state.owners
        write_weights(staging, stem, _masters(plan), masters, max_shard_size, processes=processes, owners=masters_of)
        processes.lead(lambda: write_rest(staging))
    for note in notes:
        _log.warning("note: %s", note)
    return SavedMerge(folder, dict(state.values))


def _writers(
    state: MergeState, base: Checkpoint, names: Mapping[str, str], specs: Mapping[str, TensorSpec]
) -> dict[str, int]:
    """Rank of the process that writes each tensor: who has it, and of those of a template alone who has least.

    Raises:
        CheckpointError: if a tensor of the output is made of several that different processes have.
    """
    count = state.processes.count
    if count == 1:
        return dict.fromkeys(specs, 0)
    if not set(names.values()) <= set(state.plan.parameters):
        raise CheckpointError(
            f"{base.source} is in another layout than {state.plan.pretrained.source}, which one process alone can "
            "write; give a template in the same layout, or save in one process."
        )
    owners = {
        name: state.owners[names.get(name, name)] for name in specs if names.get(name, name) in state.owners
    }  # whoever has compared a tensor that is not merged writes it as well
    rest = {name: spec.size for name, spec in specs.items() if name not in owners}  # of a template
    return owners | deal_out(rest, [0.0] * count)


def read_merge(folder: Path) -> SavedMerge:
    """An earlier output, to be continued.

    Raises:
        CheckpointError: if the folder holds none.
    """
    recover_output(folder)
    return SavedMerge(folder, read_state(folder))


def require_output(
    plan: MergePlan,
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
    base = plan.pretrained if template is None else open_checkpoint(template)
    parse_size(max_shard_size)
    check_output(folder, () if base.folder is None else (base.folder,))
    _find_merged(plan, base, {})
    require_space(folder, output_size(plan, base, dtype))


def output_size(plan: MergePlan, base: Checkpoint, dtype: OutputDtype = "same") -> int:
    """Bytes that an output takes: weights, float32 masters, the base's other files, and some room for our own.

    Args:
        plan: what is merged.
        base: the model whose tensors and files complete the output.
        dtype: of the written weights.
    """
    size = sum(spec.size for spec in (*_specs(base, dtype).values(), *_masters(plan).values()))
    if base.folder is not None:
        size += sum((base.folder / path).stat().st_size for path in side_files(base.folder))
    return size + 2**20


def _specs(base: Checkpoint, dtype: OutputDtype) -> dict[str, TensorSpec]:
    """Shape and dtype of every tensor of the output; integers keep theirs."""
    stored = {name: base.dtype(name) for name in base}
    asked = None if dtype == "same" else getattr(torch, dtype)
    return {
        name: TensorSpec(base.shape(name), asked if asked is not None and kind.is_floating_point else kind)
        for name, kind in stored.items()
    }


def _masters(plan: MergePlan) -> dict[str, TensorSpec]:
    return {name: TensorSpec(plan.pretrained.shape(name), torch.float32) for name in plan.parameters}


class _Merged(View):
    """All tensors of the merged model, by the pretrained model's names."""

    def __init__(self, pretrained: Checkpoint, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(pretrained)
        self._parameters = parameters

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[name] if name in self._parameters else self._under[name]


def _find_merged(
    plan: MergePlan, base: Checkpoint, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, str], Checkpoint]:
    """Names in the output, all names of tied tensors among them -> names in a checkpoint with the merged weights."""
    merged: Checkpoint = _Merged(plan.pretrained, parameters)
    try:
        found = {theirs: name for name, theirs in match_names(plan.parameters, base, plan.pretrained).items()}
    except CheckpointError as error:
        found, merged = _in_layout_of(base, plan, merged, error)
    for alias, first in tied_names(base).items():
        name = found.get(first) or found.get(alias)
        if name is not None:
            found |= {alias: name, first: name}
    return found, merged


def _in_layout_of(
    base: Checkpoint, plan: MergePlan, merged: Checkpoint, reason: CheckpointError
) -> tuple[dict[str, str], Checkpoint]:
    """The same for a template in another layout, such as a transformers file for a model that was in memory.

    Raises:
        CheckpointError: the reason why the names do not match, if the template has no such layout.
    """
    units = {unit.name for unit in plan.units}
    shapes, towers = base.shapes(), counterparts(base, plan.parameters, plan.pretrained)
    parts = {name: {part.name for part in pieces_of(name, shapes)} & units for name in towers}
    wanted = [name for name, found in parts.items() if found]
    other: Checkpoint | None = None
    if units == set().union(*parts.values()):
        other = convert_layout(base, wanted, merged)
    elif (renamed := respell(base, [name for name in towers if is_floating(base, name)], merged)) is not None:
        changed = set(plan.parameters)
        wanted = [name for name in renamed if not changed.isdisjoint(renamed.origins(name))]
        other = renamed if changed == {origin for name in wanted for origin in renamed.origins(name)} else None
    if other is None or any(other.shape(name) != base.shape(name) for name in wanted):
        raise reason
    return {name: name for name in wanted}, other


def _require_unchanged(state: MergeState, folder: Path) -> None:
    """Refuse to replace an output that somebody else has continued since this merge was read from or written to it."""
    if state.saved != folder.resolve() or not (folder / STATE_FILE).exists():
        return
    there = [report["merged"] for report in read_state(folder)["reports"]]
    if there != [report.merged for report in state.reports[: len(there)]]:
        raise CheckpointError(
            f"the output {folder} was continued by another process since it was read here; load it again and fold "
            "into that, or name another folder."
        )
