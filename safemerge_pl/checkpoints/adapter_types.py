"""The types of adapter that are read: their settings, their tensors, and the update that these make.

A further type whose update is added to the weight takes an entry in :data:`ADAPTER_TYPES`; nothing else knows how its
tensors are named and multiplied.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["ADAPTER_TYPES", "COMMON_SETTINGS", "MAGNITUDE", "AdapterType", "FactorKind"]

Shape = tuple[int, ...]

COMMON_SETTINGS = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode"),
        *("layers_pattern", "layers_to_transform", "modules_to_save", "peft_type", "peft_version", "r", "rank_pattern"),
        *("revision", "target_modules", "task_type"),
    }
)
"""Settings of every type of adapter that are worked in here, or leave the update as it is."""

MAGNITUDE = "lora_magnitude_vector"
"""The norms of a matrix's rows under DoRA, which a module may have beside its factors."""


@dataclass(frozen=True)
class FactorKind:
    """How an adapter stores the update of one weight.

    Attributes:
        factors: names of the tensors, all of which a module must have.
        ranked: the one that is as high as the update's rank.
        shape: shape of the update from those of the factors; empty if they do not fit each other.
        update: the update before it is scaled, ``(d_out, d_in)``, from the factors.
        is_embedding: the module is an embedding, which stores the transposed matrix.
    """

    factors: tuple[str, ...]
    ranked: str
    shape: Callable[[Mapping[str, Shape]], Shape]
    update: Callable[[Mapping[str, Tensor]], Tensor]
    is_embedding: bool = False


@dataclass(frozen=True)
class AdapterType:
    """What peft calls the type of an adapter.

    Attributes:
        alpha: name of the setting that is divided by the rank to scale the update.
        settings: names of its further settings that are worked in here, or leave the update as it is; any other that is
            on is refused.
        kinds: ways in which it stores an update; a module has the factors of one of them.
    """

    alpha: str
    settings: frozenset[str]
    kinds: tuple[FactorKind, ...]


def _low_rank(down: str, up: str, *, is_embedding: bool = False) -> FactorKind:
    """The product of two factors (Hu et al. 2022, Eq. 3), for linear layers, convolutions and embeddings."""

    def shape(shapes: Mapping[str, Shape]) -> Shape:
        fit = shapes[up][1] == shapes[down][0]
        return (shapes[up][0], *shapes[down][1:]) if fit else ()

    def update(factors: Mapping[str, Tensor]) -> Tensor:
        return factors[up].flatten(1) @ factors[down].flatten(1)

    return FactorKind((up, down), down, shape, update, is_embedding)


ADAPTER_TYPES: dict[str, AdapterType] = {
    "LORA": AdapterType(
        alpha="lora_alpha",
        settings=frozenset(
            {
                *("bias", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out", "init_lora_weights"),
                *("loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config", "megatron_core"),
                *("qalora_group_size", "runtime_config", "use_dora", "use_rslora"),
            }
        ),
        kinds=(
            _low_rank("lora_A", "lora_B"),
            _low_rank("lora_embedding_A", "lora_embedding_B", is_embedding=True),
        ),
    ),
}
"""Types of adapter by the name that peft gives them."""
