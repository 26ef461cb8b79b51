"""Pre-flight: everything that could stop a stream, found in seconds from headers, listed at once."""

import math
import shutil
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from safemerge_pl.architectures.layers import plan_stacks
from safemerge_pl.callbacks import MergeCallback
from safemerge_pl.checkpoints.fit import aligned, require_fit
from safemerge_pl.checkpoints.open import open_checkpoint
from safemerge_pl.data.experts import find_experts
from safemerge_pl.data.images import ImageSet
from safemerge_pl.data.module import StreamDataModule
from safemerge_pl.folding.selection import left_out, what_is_merged
from safemerge_pl.module import ContinualMergeModule
from safemerge_pl.output.folders import nearest

__all__ = ["check_stream"]


def check_stream(
    module: ContinualMergeModule, data: StreamDataModule, merge: MergeCallback, output: Path
) -> tuple[list[str], list[str]]:
    """Look at a whole stream without folding or scoring anything.

    Args:
        module: its backbone need not be loaded.
        data: the tasks, their order and their sets.
        merge: the callback, with method and experts.
        output: where results will be written.

    Returns:
        Facts (what would be done) and problems (what would stop it), a sentence each.
    """
    facts: list[str] = []
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
    try:
        base = open_checkpoint(module.backbone.folder())
        layers, others = what_is_merged(base, merge.method, merge.layers)
    except ValueError as error:
        return facts, [*problems, f"pretrained model: {error}"]
    facts += [f"pretrained model: {note}" for note in left_out(base, layers, others, merge.layers)]
    units = [*layers, *others]
    parameters = list(dict.fromkeys(unit.parameter for unit in units))
    try:
        experts = find_experts(merge.experts, list(data.stream))
    except MisconfigurationException as error:
        return facts, [*problems, *str(error).splitlines()]
    for task, source in experts.items():
        try:
            incoming = aligned(base, parameters, open_checkpoint(source), values=False, on_mismatch=merge.on_mismatch)
            require_fit(base, parameters, incoming, values=False)
            facts += [f"task '{task}': {note}" for note in incoming.notes]
        except ValueError as error:
            problems.append(f"task '{task}': {error}")
    entries = sum(unit.entries for unit in units)
    total = sum(math.prod(shape) for shape in base.shapes().values())
    stack = max(sum(unit.entries for unit in part) for part in plan_stacks(units))
    facts.append(f"{len(data.stream)} tasks: {', '.join(data.stream)}")
    facts.append(f"control sets: {', '.join(data.controls) or 'none (no Gen. and no H-score)'}")
    facts.append(f"method: {type(merge.method).__name__} {merge.method.settings()}")
    also = f" and {len(others)} other tensors" if others else ""
    facts.append(
        f"merged: {len(layers)} layers{also}, {entries / 1e6:.2f} M of {total / 1e6:.2f} M parameters, "
        "the rest stays pretrained"
    )
    facts.append(f"memory for merging: about {4 * (3 * entries + 8 * stack) / 2**20:.0f} MiB beside the model")
    needed = 4 * entries + 4 * total
    place = nearest(output.absolute())
    free = shutil.disk_usage(place).free
    facts.append(f"disk for the merged model: at most {needed / 2**20:.0f} MiB, {free / 2**20:.0f} MiB free in {place}")
    if needed > free:
        problems.append(f"{place} has {free / 2**20:.0f} MiB free, the merged model needs {needed / 2**20:.0f} MiB.")
    return facts, problems
