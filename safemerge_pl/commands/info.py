"""``info``: what an output holds, and whether it still is what was written."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from safemerge_pl.architectures.layers import MergeLayer, select_layers
from safemerge_pl.checkpoints.open import Checkpoint, CheckpointError, fingerprint, match_names, open_checkpoint
from safemerge_pl.checkpoints.tensors import LazyTensors
from safemerge_pl.commands.parsers import HintingParser
from safemerge_pl.folding.fates import in_words
from safemerge_pl.folding.report import FoldReport
from safemerge_pl.output.saving import read_merge
from safemerge_pl.runtime.console import fit_line
from safemerge_pl.runtime.files import local_path
from safemerge_pl.runtime.names import count_of

__all__ = ["describe_output", "make_parser", "run"]


def run() -> None:
    """Describe the folders that are named; exits with 1 if one does not match its state."""
    found = [describe_output(local_path(folder)) for folder in make_parser().parse_args(sys.argv[2:]).folders]
    for lines, _ in found:
        print("\n".join(map(fit_line, lines)))
    if not all(whole for _, whole in found):
        sys.exit(1)


def make_parser() -> HintingParser:
    """A parser of the options of this command."""
    parser = HintingParser(prog="safemerge info", description="What was merged in a folder, and does it still match.")
    parser.add_argument("--config", "-c", action="config")
    parser.add_argument("folders", nargs="+", type=str, help="outputs of a merge")
    return parser


def describe_output(folder: Path) -> tuple[list[str], bool]:
    """What was merged, when, from what, and whether the weights are still those.

    Args:
        folder: an output.

    Returns:
        Lines for a person; whether nothing contradicts the state.

    Raises:
        CheckpointError: if the folder holds no merge, or its state is damaged.
    """
    saved = read_merge(folder)
    method, reports = saved.values["method"], [FoldReport.from_dict(each) for each in saved.values["reports"]]
    settings = ", ".join(f"{key}={value}" for key, value in method["init_args"].items())
    lines = [f"{folder}: {count_of(len(reports), 'task')}, {method['class_path'].rpartition('.')[2]}({settings})"]
    for report in reports:
        revision = f"@{report.revision[:12]}" if report.revision else ""
        lines.append(f"{report.index:>3}  {report.task}  from {report.source}{revision}  {report.time or ''}".rstrip())
        told = in_words(report.shares)
        lines += [f"     {told}"] if told else []
        lines += [f"     note: {note}" for note in report.notes]
    if reports and reports[-1].response is not None:
        drift = "" if reports[-1].drift is None else f" (drift {reports[-1].drift:.2%})"
        lines.append(f"bound: {reports[-1].scale:.1%} of the accumulated vector is deployed{drift}")
    masters = saved.masters()
    told, whole = _compare_masters(masters, saved.values, reports)
    lines.append(f"masters: {told}")
    told, same = _compare_weights(folder, masters, reports)
    lines.append(f"weights: {told}")
    return lines, whole and same


def _compare_masters(masters: Checkpoint, values: Mapping[str, Any], reports: list[FoldReport]) -> tuple[str, bool]:
    layers = _layers_of(masters, {row.layer for report in reports for row in report.layers})
    if layers is None:
        return "cannot be compared without the pretrained model; `safemerge fold --merged` compares them", True
    same = _hash(masters, layers) == values["merged"]
    return f"SHA-256 {values['merged'][:16]}..., {'as' if same else 'NOT the one that'} the state says", same


def _layers_of(masters: Checkpoint, names: set[str]) -> dict[str, MergeLayer] | None:
    """The layers that were hashed, cut out as the method got them; ``None`` if their names do not tell."""
    whole = {name: MergeLayer(name, name, masters.shape(name)) for name in masters}
    try:
        matrices = [name for name in masters if len(masters.shape(name)) == 2]
        cut = {layer.name: layer for layer in select_layers(masters.shapes(), matrices)}
    except ValueError:
        cut = {}
    known = whole | cut
    layers = {name: known[name] for name in names if name in known}
    covered = {layer.parameter for layer in layers.values()}
    return layers if layers.keys() == names and covered == set(masters) else None


def _hash(tensors: Mapping[str, Tensor], layers: Mapping[str, MergeLayer]) -> str:
    return fingerprint(
        LazyTensors(sorted(layers), lambda name: layers[name].view(tensors[layers[name].parameter].float()))
    )


def _compare_weights(folder: Path, masters: Checkpoint, reports: list[FoldReport]) -> tuple[str, bool]:
    """The weights are the masters in their own format, or those with a part of the accumulated vector."""
    if reports and reports[-1].scale != 1.0:
        return "a part of the accumulated vector, which whoever continues the merge compares", True
    weights = open_checkpoint(folder)
    try:
        names = match_names(list(masters), weights)
    except CheckpointError:
        return "in another layout than the masters, not compared", True
    odd = [
        name
        for name, theirs in names.items()
        if not torch.equal(weights[theirs], masters[name].to(weights.dtype(theirs)))
    ]
    if odd:
        return f"NOT the masters, in {count_of(len(odd), 'tensor')}, first `{odd[0]}`", False
    return "equal the masters", True
