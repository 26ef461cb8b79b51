"""Find where a base keeps the tensors that an adapter changes, under the names of its file or of memory."""

from collections.abc import Collection, Iterable, Sequence

from safemerge_pl.architectures.embeddings import is_tied_candidate
from safemerge_pl.architectures.families import block_of, in_text
from safemerge_pl.architectures.layers import counterparts, vision_only
from safemerge_pl.architectures.memory_names import Spelling, common_name
from safemerge_pl.checkpoints.adapter import Adapter
from safemerge_pl.checkpoints.common_names import CommonNames
from safemerge_pl.checkpoints.names import match_names, names_alike
from safemerge_pl.checkpoints.tensors import Checkpoint
from safemerge_pl.errors import CheckpointError

__all__ = ["find_places"]


def find_places(adapter: Adapter, wanted: list[str], targets: Collection[str], base: Checkpoint) -> dict[str, Spelling]:
    """Where the base keeps each tensor; those without a place are left out where that is no mistake.

    Args:
        adapter: what was trained.
        wanted: its names of the tensors that it changes.
        targets: those of them that have factors.
        base: the model that it was trained on, with the names of its file or of its modules in memory.

    Raises:
        CheckpointError: if a tensor that must have a place has none.
    """
    if set(wanted) <= base.keys():
        return {name: Spelling(name, name) for name in wanted}
    reason, names = None, dict[str, str]()
    try:
        names = _find_names(adapter, wanted, targets, base)
    except CheckpointError as error:
        reason = error
    if len(names) < len(wanted):
        common = CommonNames(base)
        spelt = {common_name(name): name for name in wanted}
        try:
            found = _find_names(adapter, list(spelt), {common_name(name) for name in targets}, common)
        except CheckpointError:  # what it says is in names that nobody has seen
            found = {}
        if len(found) > len(names):
            return {spelt[name]: common.places[place] for name, place in found.items()}
    if reason is not None:
        raise reason
    return {name: Spelling(place, place) for name, place in names.items()}


def _find_names(adapter: Adapter, wanted: list[str], targets: Collection[str], base: Checkpoint) -> dict[str, str]:
    """The base's name of each tensor; those without one are left out where that is no mistake."""
    saved = adapter.config.get("modules_to_save") or []
    tower = set(counterparts(wanted, vision_only(base)))  # one tower has no place for the factors of the other
    must = [name for name in wanted if name in tower and not (is_tied_candidate(name) or _is_saved(name, saved))]
    if not any(name in targets for name in must):
        must = [name for name in wanted if name in targets]
    try:
        names = match_names(must, base, wanted)
    except CheckpointError:
        inner = [name for name in must if block_of(name)]  # a base without a head has no place for factors of one
        outer = _outer_part(inner, wanted, base)
        if not inner or (len(inner) == len(must) and not outer):
            raise
        names = match_names(inner, base, wanted, outer)
    return names | names_alike(names, [name for name in wanted if name not in names], base)


def _outer_part(inner: Sequence[str], wanted: Iterable[str], base: Checkpoint) -> set[str]:
    """What a model with a head calls the model inside (``vit``, ``bert``), if the base is that model alone."""
    parts = {name.split(".")[0] for name in inner}
    alone = len(parts) == 1 and not any(name.split(".")[0] in parts for name in base)
    has_head = any(name.split(".")[0] not in parts for name in wanted)
    return parts if alone and has_head and not any(map(in_text, inner)) else set()


def _is_saved(name: str, saved: Iterable[str]) -> bool:
    """Whether a tensor is of a module that the adapter's settings name as saved whole."""
    return any(f".{name}".rpartition(".")[0].endswith(f".{module}") or f".{module}." in f".{name}" for module in saved)
