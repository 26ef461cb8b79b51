"""Put an adapter on its base: where each update belongs, and the adapted model's tensors in float32."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from safemerge_pl.architectures.embeddings import is_tied_candidate
from safemerge_pl.architectures.layers import MergeLayer, counterparts, known_layers, parts_of, vision_only
from safemerge_pl.checkpoints.adapter import Adapter, Factors
from safemerge_pl.checkpoints.adapter_config import REMEDY
from safemerge_pl.checkpoints.adapter_types import MAGNITUDE
from safemerge_pl.checkpoints.layouts import layer_index
from safemerge_pl.checkpoints.names import match_names, names_alike
from safemerge_pl.checkpoints.tensors import Checkpoint, View
from safemerge_pl.errors import CheckpointError

__all__ = ["BoundAdapter", "Delta", "bind"]


@dataclass(frozen=True)
class Delta:
    """What is added to one tensor of the base.

    Attributes:
        scale: factor of the update.
        factors: tensors of the adapter that make the update, or ``None`` for one that is stored as it is.
        stored: name of an update in the adapter that is stored as it is.
        transposed: the base stores the transposed matrix.
        rows: rows of the base's upright matrix that it is added to; all if ``None``.
        taken: rows of the update that are added; all if ``None``.
    """

    scale: float
    factors: Factors | None = None
    stored: str = ""
    transposed: bool = False
    rows: tuple[int, int] | None = None
    taken: tuple[int, int] | None = None

    @property
    def keys(self) -> list[str]:
        """Names in the adapter of all that it is made of."""
        return [self.stored] if self.factors is None else list(self.factors.keys.values())


class BoundAdapter(View):
    """A base model with an adapter on it; dense tensors under the base's names, computed when they are asked for."""

    def __init__(
        self,
        adapter: Checkpoint,
        base: Checkpoint,
        deltas: Mapping[str, list[Delta]],
        replaced: Mapping[str, str],
        notes: tuple[str, ...],
    ) -> None:
        super().__init__(base)
        self.source, self.folder, self.notes = adapter.source, adapter.folder, notes
        self._adapter, self._deltas, self._replaced = adapter, dict(deltas), replaced

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._adapter[self._replaced[name]] if name in self._replaced else super().__getitem__(name)
        for delta in self._deltas.get(name, ()):
            tensor = self._add(tensor.detach().float(), delta)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Checkpoint`."""
        return self._adapter.shape(self._replaced[name]) if name in self._replaced else super().shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Checkpoint`."""
        if name in self._deltas:
            return torch.float32
        return self._adapter.dtype(self._replaced[name]) if name in self._replaced else super().dtype(name)

    def require_change(self, names: Iterable[str], *, values: bool = True) -> None:
        """Refuse an adapter that leaves all of these tensors as they are: it would be merged without effect.

        Args:
            names: tensors to merge, by the base's names.
            values: also look whether the updates are zero; otherwise at names only.

        Raises:
            CheckpointError: if none is changed.
        """
        touched = [name for name in names if name in self._deltas or name in self._replaced]
        if not touched:
            changed = [*self._deltas, *self._replaced]
            raise CheckpointError(
                f"{self.source}: the adapter changes none of the tensors to merge, but {len(changed)} others, first "
                f"`{changed[0]}`; name those to merge with `layers`."
            )
        if values and not any(self._is_changed(name) for name in touched):
            raise CheckpointError(f"{self.source}: the adapter's products are all zero; it was never trained.")

    def _is_changed(self, name: str) -> bool:
        if name in self._replaced:
            return True
        return any(all(bool(self._adapter[key].any()) for key in delta.keys) for delta in self._deltas[name])

    def _add(self, weight: Tensor, delta: Delta) -> Tensor:
        """A float32 tensor of the base with an update added to it, in memory of its own."""
        if delta.factors is None:
            return weight + self._adapter[delta.stored].float() * delta.scale
        parts = {name: self._adapter[key].float() for name, key in delta.factors.keys.items()}
        update = delta.factors.kind.update(parts)
        dense = weight.clone()
        upright = dense.T if delta.transposed else dense.flatten(1)
        target = upright if delta.rows is None else upright[slice(*delta.rows)]
        target.add_((update if delta.taken is None else update[slice(*delta.taken)]) * delta.scale)
        if MAGNITUDE not in parts:
            return dense
        magnitude = parts[MAGNITUDE].flatten()  # DoRA (Liu et al. 2024, Eq. 5): by rows of the matrix
        upright.mul_((magnitude / upright.norm(dim=1))[:, None])
        return dense


def bind(adapter: Adapter, base: Checkpoint) -> BoundAdapter:
    """Make the fine-tuned model: the base with the adapter's updates added and its saved modules in place.

    Args:
        adapter: what was trained.
        base: the model that it was trained on, in any layout.

    Raises:
        CheckpointError: if a tensor of the adapter belongs to none of the base, or does not fit it.
    """
    modules, whole = adapter.modules, adapter.whole
    targets = {_weight_name(module, base): module for module in modules}
    biases = {f"{module}.bias": factors.bias for module, factors in modules.items() if factors.bias is not None}
    wanted = [*targets, *biases, *(name for name in whole if name not in targets and name not in biases)]
    deltas: dict[str, list[Delta]] = defaultdict(list)
    try:
        names = _find_places(adapter, wanted, targets, base)
    except CheckpointError as error:
        names = {}
        deltas |= _convert_layout(adapter, targets, base, error)
    shapes = base.shapes()
    for name, module in targets.items():
        if name in names:
            deltas[names[name]].append(_delta(adapter, module, shapes, base, names[name]))
    for name, key in biases.items():
        if name in names:
            deltas[names[name]].append(Delta(adapter.scale(name.removesuffix(".bias")), stored=key))
    replaced = {names[name]: key for name, key in whole.items() if name in names}
    missing = [name for name in wanted if name not in names] if names else list(whole)
    notes = list(adapter.notes)
    if missing:
        notes.append(
            f"{len(missing)} tensors of the adapter have no place in the pretrained model, first `{missing[0]}`"
        )
    return BoundAdapter(adapter, base, deltas, replaced, (*notes, *adapter.base_notes(base)))


def _find_places(adapter: Adapter, wanted: list[str], targets: Mapping[str, str], base: Checkpoint) -> dict[str, str]:
    """The base's name of each tensor; those without one are left out where that is no mistake."""
    if set(wanted) <= base.keys():
        return {name: name for name in wanted}
    saved = adapter.config.get("modules_to_save") or []
    tower = set(counterparts(wanted, vision_only(base)))  # one tower has no place for the factors of the other
    must = [name for name in wanted if name in tower and not (is_tied_candidate(name) or _is_saved(name, saved))]
    if not any(name in targets for name in must):
        must = [name for name in wanted if name in targets]
    names = match_names(must, base, wanted)
    return names | names_alike(names, [name for name in wanted if name not in names], base)


def _convert_layout(
    adapter: Adapter, targets: Mapping[str, str], base: Checkpoint, reason: CheckpointError
) -> dict[str, list[Delta]]:
    """Updates for a base in another library's layout, piece by piece."""
    index = layer_index(base)
    deltas: dict[str, list[Delta]] = defaultdict(list)
    shapes = {name: _target_shape(adapter, name, module) for name, module in targets.items()}
    for name in counterparts(targets, vision_only(base)):
        module = targets[name]
        factors = adapter.modules[module]
        plain = not factors.kind.is_embedding and factors.bias is None and MAGNITUDE not in factors.keys
        parts = _parts(adapter, name, shapes) if plain else []
        places = [index.get(part.name) for part in parts]
        if not parts or None in places:
            raise CheckpointError(
                f"{adapter.source}: the adapter's `{module}` has no place in {base.source}: {reason}"
            ) from reason
        for part, place in zip(parts, places, strict=True):
            assert place is not None
            if part.shape != place.shape:
                raise CheckpointError(
                    f"{adapter.source}: the adapter's `{module}` is for a matrix of shape {part.shape}, "
                    f"`{place.parameter}` in {base.source} has {place.shape}: is it an adapter of this model?"
                )
            delta = Delta(adapter.scale(module), factors, "", place.transposed, place.rows, part.rows)
            deltas[place.parameter].append(delta)
    return deltas


def _parts(adapter: Adapter, name: str, shapes: Mapping[str, tuple[int, ...]]) -> list[MergeLayer]:
    """The layers inside the tensor that a module's factors were trained for."""
    try:
        return parts_of(name, shapes)
    except ValueError as error:
        raise CheckpointError(f"{adapter.source}: {error}") from error


def _target_shape(adapter: Adapter, name: str, module: str) -> tuple[int, ...]:
    """Shape of the tensor that a module's factors were trained for."""
    shape = adapter.modules[module].kind.shape(adapter.factor_shapes(module))
    return shape[::-1] if _is_transposed(adapter, name, {name: shape[::-1]}) else shape


def _delta(
    adapter: Adapter, module: str, shapes: Mapping[str, tuple[int, ...]], base: Checkpoint, theirs: str
) -> Delta:
    """The update of a whole tensor ``theirs`` of the base, all of whose ``shapes`` tell how it lies."""
    factors, shape = adapter.modules[module], shapes[theirs]
    if factors.kind.is_embedding and MAGNITUDE in factors.keys:
        raise CheckpointError(f"{adapter.source}: `{module}` is an embedding under DoRA, which is not read; {REMEDY}.")
    transposed = factors.kind.is_embedding or _is_transposed(adapter, theirs, shapes)
    found = adapter.factor_shapes(module)
    update = factors.kind.shape(found)
    if (update[::-1] if transposed else update) != shape:
        raise CheckpointError(
            f"{adapter.source}: the factors of `{module}`, {' and '.join(map(str, found.values()))}, do not fit "
            f"`{theirs}` of shape {shape} in {base.source}; if they were trained on this model, {REMEDY}."
        )
    return Delta(adapter.scale(module), factors, transposed=transposed)


def _weight_name(module: str, base: Checkpoint) -> str:
    """The tensor that a module's factors are added to; a fused attention keeps its weight under another name."""
    fused = f"{module}.in_proj_weight"
    ending = f"{module.rpartition('.')[2]}.in_proj_weight"
    return fused if known_layers([fused]) or any(name.endswith(ending) for name in base) else f"{module}.weight"


def _is_transposed(adapter: Adapter, name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a matrix is stored as ``(d_in, d_out)``: by its family where that is known, else by the adapter."""
    if len(shapes[name]) != 2:
        return False
    try:
        parts = parts_of(name, shapes)
    except ValueError:  # nothing beside it tells
        parts = []
    return parts[0].transposed if parts else bool(adapter.config.get("fan_in_fan_out"))


def _is_saved(name: str, saved: Iterable[str]) -> bool:
    """Whether a tensor is of a module that the adapter's settings name as saved whole."""
    return any(f".{name}".rpartition(".")[0].endswith(f".{module}") or f".{module}." in f".{name}" for module in saved)
