"""Find tensors under the names that wrappers, libraries and training scripts give them."""

import re
from collections.abc import Iterable, Mapping, Sequence

from safemerge_pl.architectures.embeddings import is_vocabulary, shared_names
from safemerge_pl.architectures.families import WRAPPERS, has_fused_experts
from safemerge_pl.architectures.layers import counterparts
from safemerge_pl.checkpoints.tensors import Checkpoint
from safemerge_pl.errors import CheckpointError

__all__ = ["match_names", "names_alike", "unwrap"]


def match_names(
    wanted: Sequence[str],
    checkpoint: Checkpoint,
    beside: Iterable[str] | None = None,
    wrappers: Iterable[str] = (),
) -> dict[str, str]:
    """Find each wanted tensor in a checkpoint whose names may carry or lack wrapper and tower prefixes.

    ``_orig_mod.`` and ``module.`` are ignored anywhere; beyond that one prefix on either side may differ
    (``vision_model.``, ``model.visual.``, ...), the same for all tensors. Nothing is matched partly.

    Args:
        wanted: names in the pretrained model.
        checkpoint: the incoming model.
        beside: all names of the pretrained model, which tell of which tower those are; ``wanted`` if left out.
        wrappers: further first parts of wanted names that the checkpoint may leave out.

    Returns:
        wanted name -> name in the checkpoint.

    Raises:
        CheckpointError: if a tensor is missing, or there are two ways to match.

    Example:
        >>> import torch
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> incoming = Memory({"module.encoder.fc1.weight": torch.zeros(1, 1)}, "a mapping")
        >>> match_names(["vision_model.encoder.fc1.weight"], incoming)
        {'vision_model.encoder.fc1.weight': 'module.encoder.fc1.weight'}
    """
    available: dict[str, str] = {}
    for name in counterparts(checkpoint, wanted, beside):
        bare = unwrap(name)
        if bare in available:
            raise CheckpointError(f"{checkpoint.source}: `{available[bare]}` and `{name}` are the same tensor's name.")
        available[bare] = name
    for alias, full in [(alias, full) for bare, full in available.items() for alias in shared_names(bare)]:
        available.setdefault(alias, full)
    targets = {name: unwrap(name) for name in wanted}
    best: dict[str, str] = {}
    for mine, theirs in _prefix_pairs(list(targets.values()), available, set(wrappers)):
        matched = {
            name: available[theirs + bare[len(mine) :]]
            for name, bare in targets.items()
            if theirs + bare[len(mine) :] in available
        }
        if len(matched) == len(targets) == len(best) and matched != best:
            raise CheckpointError(
                f"{checkpoint.source} holds the model twice, as `{next(iter(best.values()))}` and as "
                f"`{next(iter(matched.values()))}`; give the tensors of one of them."
            )
        if len(matched) > len(best):
            best = matched
    missing = [name for name in wanted if name not in best]
    if missing:
        found = f"; it has, for example, `{next(iter(checkpoint))}`" if not best and len(checkpoint) else ""
        raise CheckpointError(
            f"{checkpoint.source} lacks {len(missing)} of {len(wanted)} tensors to merge, first `{missing[0]}`{found}: "
            f"{_hint(wanted, checkpoint)}"
        )
    return best


def _hint(wanted: Iterable[str], checkpoint: Iterable[str]) -> str:
    """What may be the matter where tensors are missing."""
    fused = [next((name for name in names if has_fused_experts(name)), None) for names in (wanted, checkpoint)]
    if (fused[0] is None) == (fused[1] is None):
        return "is it a fine-tune of this pretrained model?"
    return (
        f"experts are fused in one of the models (`{fused[0] or fused[1]}`), as transformers has them in memory and "
        "not in files; give both as folders, or both in memory"
    )


def names_alike(matched: Mapping[str, str], others: Iterable[str], checkpoint: Checkpoint) -> dict[str, str]:
    """Find further tensors under the prefix that an earlier match found; those that are absent are left out.

    Args:
        matched: what :func:`match_names` gave.
        others: further names in the pretrained model.
        checkpoint: the incoming model.

    Example:
        >>> import torch
        >>> from safemerge_pl.checkpoints.tensors import Memory
        >>> incoming = Memory({"model.fc1.weight": torch.zeros(1, 1), "model.fc1.bias": torch.zeros(1)}, "a mapping")
        >>> names_alike({"fc1.weight": "model.fc1.weight"}, ["fc1.bias", "fc2.bias"], incoming)
        {'fc1.bias': 'model.fc1.bias'}
    """
    available = {unwrap(name): name for name in checkpoint}
    mine, theirs = (unwrap(name).split(".") for name in next(iter(matched.items())))
    same = 0
    while same < min(len(mine), len(theirs)) and mine[-1 - same] == theirs[-1 - same]:
        same += 1
    drop, put = ("".join(f"{part}." for part in names[: len(names) - same]) for names in (mine, theirs))
    found = {}
    for name in others:
        bare = unwrap(name)
        core = put + bare[len(drop) :] if bare.startswith(drop) else bare
        if core in available:
            found[name] = available[core]
    return found


def unwrap(name: str) -> str:
    """Take off the marks that torch.compile, DDP, FSDP and activation checkpointing leave in a name.

    Example:
        >>> unwrap("module._orig_mod.encoder.fc1.weight")
        'encoder.fc1.weight'
    """
    return re.sub(r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", name)


def _prefix_pairs(targets: list[str], available: Mapping[str, str], wrappers: set[str]) -> list[tuple[str, str]]:
    """List the pairs (prefix to drop from the wanted names, prefix to put instead) that fit the first wanted name."""
    first, pairs = targets[0], []
    speaks = any(map(is_vocabulary, available))  # no vision tower has words
    wrappers |= WRAPPERS | ({"text_model", "text_encoder"} if speaks else set())
    for match in re.finditer(r"^|\.", first):
        mine, core = first[: match.end()], first[match.end() :]
        if not set(mine.split(".")[:-1]) <= wrappers or not all(target.startswith(mine) for target in targets):
            break
        theirs = [name[: -len(core)] for name in available if name == core or name.endswith("." + core)]
        pairs += [(mine, prefix) for prefix in theirs if not mine or not prefix.endswith(mine)]
    return pairs
