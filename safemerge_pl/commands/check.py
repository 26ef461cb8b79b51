"""Pre-flight: everything that could stop a stream, found in seconds from headers, listed at once."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.callbacks import ComparedMethod, MergeCallback, MethodComparison
from safemerge_pl.checkpoints.differences import Mismatch
from safemerge_pl.checkpoints.fit import fit
from safemerge_pl.checkpoints.open import Checkpoint, Source, open_checkpoint
from safemerge_pl.commands.fit import build_cli
from safemerge_pl.data.experts import find_experts
from safemerge_pl.data.images import ImageSet
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.folding.leading import QUICKLY_DECOMPOSED, LeadingDirections, standing_out
from safemerge_pl.folding.selection import MergePlan, plan_merge
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.output.folders import nearest
from safemerge_pl.output.saving import output_size
from safemerge_pl.runtime.console import fit_line
from safemerge_pl.runtime.names import count_of

__all__ = ["check_stream", "run"]


def run() -> None:
    """List facts and problems of a configuration; exits with 1 if there is a problem."""
    sys.argv = [sys.argv[0], "fit", *sys.argv[2:]]  # it takes what `fit` takes, and what `fit` wrote
    cli = build_cli(run=False)
    merge = MergeCallback.of(cli.trainer)
    if merge is None:
        raise MisconfigurationException(
            "the configuration has no merge callback: add SAFEMergeCallback under trainer.callbacks."
        )
    callbacks = cli.trainer.callbacks  # type: ignore[attr-defined]
    compared = [entry for each in callbacks if isinstance(each, MethodComparison) for entry in each.methods]
    facts, problems = check_stream(cli.model, cli.datamodule, merge, Path(cli.trainer.default_root_dir), compared)
    for fact in facts:
        print(fit_line(fact))
    for problem in problems:
        print(fit_line(f"PROBLEM {problem}"), file=sys.stderr)
    if problems:
        sys.exit(f"safemerge: {count_of(len(problems), 'problem')} found.")
    print("no problem found")


def check_stream(
    module: ContinualMergeModule,
    data: StreamDataModule,
    merge: MergeCallback,
    output: Path,
    compared: Sequence[ComparedMethod] = (),
) -> tuple[list[str], list[str]]:
    """Look at a whole stream without folding or scoring anything.

    Args:
        module: its backbone need not be loaded.
        data: the tasks, their order and their sets.
        merge: the callback, with method and experts.
        output: where results will be written.
        compared: methods that fold the same models for comparison.

    Returns:
        Facts (what would be done) and problems (what would stop it), a sentence each.
    """
    facts: list[str] = []
    problems = _problems_of_sets(data)
    try:
        base = open_checkpoint(module.backbone.folder())
        plan = plan_merge(base, merge.method, merge.layers)
    except ValueError as error:
        return facts, [*problems, f"pretrained model: {error}"]
    facts += [f"pretrained model: {note}" for note in plan.notes]
    for entry in compared:
        try:
            plan_merge(base, entry.method, merge.layers)
        except ValueError as error:
            problems.append(f"`compare`: {entry.label}: {error}")
    try:
        experts = find_experts(merge.experts, list(data.stream))
    except MisconfigurationException as error:
        return facts, [*problems, *str(error).splitlines()]
    told, wrong = _look_at_experts(base, plan, experts, merge.on_mismatch)
    facts, problems = facts + told, problems + wrong
    facts.append(f"{len(data.stream)} tasks: {', '.join(data.stream)}")
    facts.append(f"control sets: {', '.join(data.controls) or 'none (no Gen. and no H-score)'}")
    facts.append(f"method: {type(merge.method).__name__} {merge.method.settings()}")
    also = f" and {len(plan.others)} other tensors" if plan.others else ""
    facts.append(
        f"merged: {len(plan.layers)} layers{also}, {plan.entries / 1e6:.2f} M of {plan.total / 1e6:.2f} M parameters, "
        "the rest stays pretrained"
    )
    facts.append(f"memory for merging: about {plan.memory / 2**20:.0f} MiB beside the model")
    place = nearest(output.absolute())
    free = shutil.disk_usage(place).free
    try:
        needed = output_size(plan, base, "float32")
    except ValueError as error:
        return facts, [*problems, f"merged model: {error}"]
    facts.append(f"disk for the merged model: at most {needed / 2**20:.0f} MiB, {_rounded(free)} free in {place}")
    if needed > free:
        problems.append(f"{place} has {free / 2**20:.0f} MiB free, the merged model needs {needed / 2**20:.0f} MiB.")
    return facts, problems


def _problems_of_sets(data: StreamDataModule) -> list[str]:
    """What is wrong with the images and labels of tasks and control sets."""
    problems: list[str] = []
    for name in (*data.stream, *data.controls):
        try:
            examples = data.labelled_set(name)
            if not len(examples):
                problems.append(f"set '{name}' is empty.")
            elif isinstance(examples, ImageSet):
                labels = examples.rows.select_columns("label").with_format("numpy")[:]["label"]  # a column is slow
                highest, count = int(labels.max()), len(examples.classes)
                if highest >= count:
                    problems.append(f"set '{name}' has the label {highest} but only {count} class names.")
        except (OSError, ValueError, KeyError) as error:
            problems.append(f"set '{name}': {error}")
    return problems


def _look_at_experts(
    base: Checkpoint, plan: MergePlan, experts: Mapping[str, Source], on_mismatch: Mismatch
) -> tuple[list[str], list[str]]:
    """Facts and problems of the models to merge; one that stands out from those before it is a fact."""
    facts: list[str] = []
    problems: list[str] = []
    leading, usual = LeadingDirections(plan.parameters, base), list[float | None]()
    for task, source in experts.items():
        try:
            opened = open_checkpoint(source)
            incoming = fit(base, plan.parameters, opened, values=False, on_mismatch=on_mismatch)
            facts += [f"task '{task}': {note}" for note in incoming.notes]
            quick = not incoming.is_adapter and leading.width <= QUICKLY_DECOMPOSED
            share = leading.share(incoming) if quick else None
        except ValueError as error:
            problems.append(f"task '{task}': {error}")
            continue
        told = standing_out(share, usual)
        facts += [f"task '{task}': {told}"] if told else []
        usual.append(share)
    return facts, problems


def _rounded(size: int) -> str:
    """A size as coarse as a decision needs it, so that two checks in a row say the same."""
    return f"{size / 2**30:.0f} GiB" if size >= 10 * 2**30 else f"{size / 2**20:.0f} MiB"
