"""Put an adapter on its base: where each update belongs, and the adapted model's tensors in float32."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from safemerge_pl.architectures.families import block_of
from safemerge_pl.architectures.layers import MergeLayer, counterparts, known_layers, parts_of, vision_only
from safemerge_pl.architectures.memory_names import Spelling
from safemerge_pl.architectures.pieces import pieces_of
from safemerge_pl.architectures.rotary import is_paired, reorder
from safemerge_pl.checkpoints.adapter import Adapter, Factors
from safemerge_pl.checkpoints.adapter_config import REMEDY
from safemerge_pl.checkpoints.adapter_places import find_places
from safemerge_pl.checkpoints.adapter_types import MAGNITUDE
from safemerge_pl.checkpoints.head_size import rotary_size
from safemerge_pl.checkpoints.layouts import layer_index
from safemerge_pl.checkpoints.tensors import Checkpoint, View
from safemerge_pl.errors import CheckpointError

__all__ = ["BoundAdapter", "Delta", "bind"]


@dataclass(frozen=True)
class Order:
    """Rows of rotary heads that stand in another order in the base than in what an adapter was trained on.

    Attributes:
        size: rows of a head; 0 if both have one order.
        to_pairs: the base has rotary pairs side by side, the adapter in halves of a head.
    """

    size: int = 0
    to_pairs: bool = False

    def apply(self, tensor: Tensor) -> Tensor:
        """Put rows of the adapter in the base's order."""
        return reorder(tensor, self.size, to_pairs=self.to_pairs) if self.size else tensor


@dataclass(frozen=True)
class Delta:
    """What is added to one tensor of the base.

    Attributes:
        scale: factor of the update.
        factors: tensors of the adapter that make the update, or ``None`` for one that is stored as it is.
        stored: name of an update in the adapter that is stored as it is.
        transposed: the base stores the transposed matrix.
        rows: rows of the base's upright tensor that it is added to; all if ``None``.
        taken: rows of the update that are added; all if ``None``.
        order: of these rows.
    """

    scale: float
    factors: Factors | None = None
    stored: str = ""
    transposed: bool = False
    rows: tuple[int, int] | None = None
    taken: tuple[int, int] | None = None
    order: Order = Order()

    @property
    def keys(self) -> list[str]:
        """Names in the adapter of all that it is made of."""
        return [self.stored] if self.factors is None else list(self.factors.keys.values())


@dataclass(frozen=True)
class Saved:
    """A tensor of the adapter that stands in for one of the base, or for some of its rows.

    Attributes:
        key: its name in the adapter.
        rows: rows of the base's tensor; all if ``None``.
        taken: rows of the adapter's tensor; all if ``None``.
        order: of these rows.
    """

    key: str
    rows: tuple[int, int] | None = None
    taken: tuple[int, int] | None = None
    order: Order = Order()


class BoundAdapter(View):
    """A base model with an adapter on it; dense tensors under the base's names, computed when they are asked for."""

    def __init__(
        self,
        adapter: Checkpoint,
        base: Checkpoint,
        deltas: Mapping[str, list[Delta]],
        replaced: Mapping[str, list[Saved]],
        notes: tuple[str, ...],
    ) -> None:
        super().__init__(base)
        self.source, self.folder, self.notes = adapter.source, adapter.folder, notes
        self._adapter, self._deltas, self._replaced = adapter, dict(deltas), replaced

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._saved(name) if name in self._replaced else super().__getitem__(name)
        for delta in self._deltas.get(name, ()):
            tensor = self._add(tensor.detach().float(), delta)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """See :class:`Checkpoint`."""
        whole = self._whole(name)
        if whole is None:
            return super().shape(name)
        shape = self._adapter.shape(whole.key)
        return shape if whole.taken is None else (whole.taken[1] - whole.taken[0], *shape[1:])

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`Checkpoint`."""
        if name in self._deltas:
            return torch.float32
        whole = self._whole(name)
        dtype = super().dtype(name) if whole is None else self._adapter.dtype(whole.key)
        for saved in self._replaced.get(name, ()):
            dtype = torch.promote_types(dtype, self._adapter.dtype(saved.key))
        return dtype

    def _whole(self, name: str) -> Saved | None:
        """What of the adapter stands in for all of a tensor of the base."""
        return next((saved for saved in self._replaced.get(name, ()) if saved.rows is None), None)

    def _saved(self, name: str) -> Tensor:
        """A tensor of the base with the adapter's own in its place, or in the place of some of its rows."""
        whole = self._whole(name)
        if whole is not None:
            return self._read_saved(whole)
        dtype = torch.float32 if name in self._deltas else self.dtype(name)
        tensor = super().__getitem__(name).detach().to(dtype, copy=True)
        for saved in self._replaced[name]:
            assert saved.rows is not None
            tensor[slice(*saved.rows)] = self._read_saved(saved)
        return tensor

    def _read_saved(self, saved: Saved) -> Tensor:
        found = self._adapter[saved.key]
        return saved.order.apply(found if saved.taken is None else found[slice(*saved.taken)])

    def touches(self, name: str) -> bool:
        """Whether the adapter changes a tensor of the base, or stands in for it."""
        return name in self._deltas or name in self._replaced

    def require_change(self, names: Iterable[str], *, values: bool = True) -> None:
        """Refuse an adapter that leaves all of these tensors as they are: it would be merged without effect.

        Args:
            names: tensors to merge, by the base's names.
            values: also look whether the updates are zero; otherwise at names only.

        Raises:
            CheckpointError: if none is changed.
        """
        touched = [name for name in names if self.touches(name)]
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
            update = self._adapter[delta.stored].float() * delta.scale
            if delta.rows is None:
                return weight + update
            dense = weight.clone()
            dense[slice(*delta.rows)] += update
            return dense
        parts = {name: self._adapter[key].float() for name, key in delta.factors.keys.items()}
        update = delta.factors.kind.update(parts)
        dense = weight.clone()
        upright = dense.T if delta.transposed else dense.flatten(1)
        target = upright if delta.rows is None else upright[slice(*delta.rows)]
        update = update if delta.taken is None else update[slice(*delta.taken)]
        target.add_(delta.order.apply(update) * delta.scale)
        if MAGNITUDE not in parts:
            return dense
        magnitude = parts[MAGNITUDE].flatten()  # DoRA (Liu et al. 2024, Eq. 5): by rows of the matrix
        target.mul_((magnitude / target.norm(dim=1))[:, None])
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
    replaced: dict[str, list[Saved]] = defaultdict(list)
    try:
        places = find_places(adapter, wanted, targets, base)
    except CheckpointError as error:
        inner = {name: module for name, module in targets.items() if block_of(name)}
        if not inner:
            raise CheckpointError(
                f"{adapter.source}: the adapter changes `{next(iter(targets))}`, which {base.source} does not have; "
                "give the model that it was trained on, with its head, as `pretrained`."
            ) from error
        index = layer_index(base)
        deltas |= _convert_layout(adapter, inner, base, index, error)
        places, (replaced, missing) = {}, _convert_whole(adapter, base, index)
        missing += [name for name in targets if name not in inner]
    else:
        missing = [name for name in wanted if name not in places]
    shapes = base.shapes()
    for name, place in places.items():
        if name in targets:
            deltas[place.parameter].append(_delta(adapter, targets[name], shapes, base, place))
        elif name in biases:
            scale = adapter.scale(name.removesuffix(".bias"))
            deltas[place.parameter].append(Delta(scale, stored=biases[name], rows=place.rows))
        if name in whole:
            replaced[place.parameter].append(_replacement(adapter, whole[name], base, place))
    notes = list(adapter.notes)
    if missing:
        notes.append(
            f"{len(missing)} tensors of the adapter have no place in the pretrained model, first `{missing[0]}`"
        )
    return BoundAdapter(adapter, base, deltas, replaced, (*notes, *adapter.base_notes(base)))


def _convert_layout(
    adapter: Adapter,
    targets: Mapping[str, str],
    base: Checkpoint,
    index: Mapping[str, MergeLayer],
    reason: CheckpointError,
) -> dict[str, list[Delta]]:
    """Updates for a base in another library's layout, piece by piece."""
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
            order = _order(base, place.parameter, adapter, name)
            delta = Delta(adapter.scale(module), factors, "", place.transposed, place.rows, part.rows, order)
            deltas[place.parameter].append(delta)
    return deltas


def _order(base: Checkpoint, place: str, adapter: Adapter, name: str) -> Order:
    """How rows of a tensor that the adapter was trained for stand in the base."""
    return Order(rotary_size(base, place, adapter, name), is_paired(place))


def _parts(adapter: Adapter, name: str, shapes: Mapping[str, tuple[int, ...]]) -> list[MergeLayer]:
    """The layers inside the tensor that a module's factors were trained for."""
    try:
        return parts_of(name, shapes)
    except ValueError as error:
        raise CheckpointError(f"{adapter.source}: {error}") from error


def _convert_whole(
    adapter: Adapter, base: Checkpoint, index: Mapping[str, MergeLayer]
) -> tuple[dict[str, list[Saved]], list[str]]:
    """Biases and saved modules for a base in another library's layout, and the names of those without a place."""
    replaced: dict[str, list[Saved]] = defaultdict(list)
    missing = []
    shapes = {name: adapter.shape(key) for name, key in adapter.whole.items()}
    for name, key in adapter.whole.items():
        parts = pieces_of(name, shapes)
        places = [index.get(part.name) for part in parts]
        pairs = [
            (part, place) for part, place in zip(parts, places, strict=True) if place and part.shape == place.shape
        ]
        if not parts or len(pairs) < len(parts) or any(one.transposed or other.transposed for one, other in pairs):
            missing.append(name)
            continue
        for part, place in pairs:
            order = _order(base, place.parameter, adapter, name)
            replaced[place.parameter].append(Saved(key, place.rows, part.rows, order))
    return replaced, missing


def _replacement(adapter: Adapter, key: str, base: Checkpoint, place: Spelling) -> Saved:
    """A tensor of the adapter in the place of a whole one, which may be of another size, or of some rows."""
    if place.rows is not None:
        shape = (place.rows[1] - place.rows[0], *base.shape(place.parameter)[1:])
        if adapter.shape(key) != shape:
            raise CheckpointError(
                f"{adapter.source}: `{key}` has shape {adapter.shape(key)}, its rows of `{place.parameter}` in "
                f"{base.source} have {shape}: is it an adapter of this model?"
            )
    return Saved(key, place.rows)


def _target_shape(adapter: Adapter, name: str, module: str) -> tuple[int, ...]:
    """Shape of the tensor that a module's factors were trained for."""
    shape = adapter.modules[module].kind.shape(adapter.factor_shapes(module))
    return shape[::-1] if _is_transposed(adapter, name, {name: shape[::-1]}) else shape


def _delta(
    adapter: Adapter, module: str, shapes: Mapping[str, tuple[int, ...]], base: Checkpoint, place: Spelling
) -> Delta:
    """The update of what the base keeps at ``place``; the ``shapes`` of the whole base tell how it lies."""
    factors, shape = adapter.modules[module], shapes[place.parameter]
    if place.rows is not None:
        shape = (place.rows[1] - place.rows[0], *shape[1:])
    if factors.kind.is_embedding and MAGNITUDE in factors.keys:
        raise CheckpointError(f"{adapter.source}: `{module}` is an embedding under DoRA, which is not read; {REMEDY}.")
    transposed = factors.kind.is_embedding or _is_transposed(adapter, place.parameter, shapes)
    found = adapter.factor_shapes(module)
    update = factors.kind.shape(found)
    if (update[::-1] if transposed else update) != shape:
        raise CheckpointError(
            f"{adapter.source}: the factors of `{module}`, {' and '.join(map(str, found.values()))}, do not fit "
            f"`{place.parameter}` of shape {shape} in {base.source}; if they were trained on this model, {REMEDY}."
        )
    return Delta(adapter.scale(module), factors, transposed=transposed, rows=place.rows)


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
