"""A base model with low-rank products on it, tensor by tensor, in float32."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from safemerge_pl.checkpoints.tensors import Checkpoint, View
from safemerge_pl.errors import CheckpointError

__all__ = ["BoundAdapter", "Delta"]


@dataclass(frozen=True)
class Delta:
    """What is added to one tensor of the base.

    Attributes:
        scale: factor of the product.
        factors: tensors of the adapter by kind.
        turned: the base stores the transposed matrix.
        rows: rows of the base's upright matrix that it is added to; all if ``None``.
        taken: rows of the product that are added; all if ``None``.
    """

    scale: float
    factors: Mapping[str, str]
    turned: bool = False
    rows: tuple[int, int] | None = None
    taken: tuple[int, int] | None = None


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
            tensor = self._added(tensor.detach().float(), delta)
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
        """Refuse an adapter that leaves all of these tensors as they are (G1).

        Args:
            names: tensors to merge, by the base's names.
            values: also look whether the products are zero; otherwise at names only.

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
        return any(
            all(bool(self._adapter[key].any()) for key in delta.factors.values()) for delta in self._deltas[name]
        )

    def _added(self, weight: Tensor, delta: Delta) -> Tensor:
        parts = {kind: self._adapter[key].float() for kind, key in delta.factors.items()}
        if "bias" in parts:
            return weight + parts["bias"] * delta.scale
        kind = "lora_embedding" if "lora_embedding_A" in parts else "lora"
        up, down = parts[f"{kind}_B"].flatten(1), parts[f"{kind}_A"].flatten(1)
        product = (up @ down if delta.taken is None else (up @ down)[slice(*delta.taken)]) * delta.scale
        dense = weight.clone()
        upright = dense.T if delta.turned else dense.flatten(1)
        (upright if delta.rows is None else upright[slice(*delta.rows)]).add_(product)
        if "lora_magnitude_vector" not in parts:
            return dense
        magnitude = parts["lora_magnitude_vector"].flatten()  # DoRA (Liu et al. 2024, Eq. 5): by rows of the matrix
        upright.mul_((magnitude / upright.norm(dim=1))[:, None])
        return dense
