"""What a fold leaves out of an incoming model, and what the user should know of it."""

import math
from collections.abc import Iterator, Mapping, Sequence

from safemerge_pl.architectures.groups import is_head
from safemerge_pl.checkpoints.fit import Fitted
from safemerge_pl.checkpoints.tensors import Checkpoint
from safemerge_pl.folding.fates import GroupShares, left_energy
from safemerge_pl.folding.leading import standing_out
from safemerge_pl.folding.processes import Processes
from safemerge_pl.folding.report import FoldReport
from safemerge_pl.folding.selection import MergePlan
from safemerge_pl.runtime.cores import map_on_cores
from safemerge_pl.runtime.names import count_of

__all__ = ["describe_merge", "measure_left", "remark"]


def measure_left(
    fitted: Fitted, pretrained: Checkpoint, processes: Processes, owners: Mapping[str, int]
) -> dict[str, float]:
    """Measure the change of each tensor that is not merged; each is read once, in small parts.

    Args:
        fitted: the incoming model.
        pretrained: the model that it was fine-tuned from.
        processes: among which the tensors are shared out.
        owners: rank of the process that has each tensor.

    Returns:
        Squared length of each change, by name, the same on every process.

    Raises:
        PeerError: if a tensor cannot be read on another process; here the error itself.
    """

    def measure(name: str) -> float:
        theirs = fitted.incoming[fitted.beside[name]]
        return 0.0 if theirs.is_meta else left_energy(pretrained[name], theirs)

    names = fitted.changed_beside()
    mine = [name for name in names if owners[name] == processes.rank]
    found = processes.collect(lambda: dict(zip(mine, map_on_cores(measure, mine), strict=True)))
    return {name: found[name] for name in names}


def remark(
    left: Mapping[str, float], shares: Sequence[GroupShares], leading: float | None, earlier: Sequence[float | None]
) -> Iterator[str]:
    """Say what the user should know of what is left out, and of a model that stands out; a sentence each.

    Args:
        left: from :func:`measure_left`.
        shares: of the squared task vector, by group.
        leading: share of the change in the pretrained model's leading directions.
        earlier: those of the models before it.

    Example:
        >>> next(remark({"lm_head.weight": 1.0}, [GroupShares("head", pretrained=0.25)], None, []))[:74]
        'its head was trained (25.0% of the squared task vector) and stays pretrain'
    """
    broken = [name for name, size in left.items() if not math.isfinite(size)]
    if broken:
        yield f"its `{broken[0]}` has NaN or Inf; it is not merged"
    heads = [name for name, size in left.items() if size and is_head(name)]
    share = sum(group.pretrained for group in shares if group.group == "head")
    if heads and share >= 0.0005:  # less would be called 0.0%
        yield (
            f"its head was trained ({share:.1%} of the squared task vector) and stays pretrained, first `{heads[0]}`: "
            "name it with `layers` beside the matrices to merge, take a method that merges every tensor "
            '(TaskArithmetic, OPCM), or in a training loop keep it as trained with `rest="keep"`'
        )
    told = standing_out(leading, earlier)
    if told is not None:
        yield told


def describe_merge(plan: MergePlan, label: str, reports: Sequence[FoldReport]) -> str:
    """Describe a merge in a few sentences.

    Args:
        plan: the pretrained model, and what is merged of it.
        label: name of the method.
        reports: one per fold.
    """
    also = f" and {len(plan.others)} other tensors" if plan.others else ""
    tasks = ", ".join(report.task for report in reports)
    count = count_of(len(reports), "task")
    lines = [
        f"{label} into {plan.pretrained.source}: {len(plan.layers)} layers{also}, {plan.entries / 1e6:.2f} M of "
        f"{plan.total / 1e6:.2f} M parameters.",
        f"{count} merged: {tasks}." if reports else "Nothing is merged yet.",
    ]
    if reports and reports[-1].response is not None:
        lines.append(f"{reports[-1].scale:.1%} of the accumulated vector is deployed.")
    return "\n".join(lines)
