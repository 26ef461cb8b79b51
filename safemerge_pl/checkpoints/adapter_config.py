"""Settings of a PEFT adapter: which of them are worked in, and which are refused by name."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safemerge_pl.errors import CheckpointError

__all__ = ["ADAPTER_CONFIG", "REMEDY", "read_adapter_config", "value_by_pattern"]

ADAPTER_CONFIG = "adapter_config.json"
REMEDY = "merge it into its base model with peft's merge_and_unload() and give the saved result"

_HARMLESS = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
    *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config"),
    *("megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern"),
    *("revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora"),
}
"""Settings that leave W + scale * B A as it is, or that are worked in here; any other one that is on is refused."""

_MOVES_BASE = re.compile(r"pissa|olora|corda|loftq|lora_ga", re.IGNORECASE)
"""Initialisations that also change the base weights, which the adapter's factors are then relative to."""


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Settings of a LoRA adapter that can be merged.

    Raises:
        CheckpointError: if it is damaged, of another type, or uses a variant that is not known here.
    """
    try:
        config: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} is no adapter configuration ({error}); fetch it again.") from error
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path.parent} is a PEFT adapter of type {kind}, only LORA is read; {REMEDY}.")
    if _MOVES_BASE.match(str(config.get("init_lora_weights"))):
        raise CheckpointError(
            f"{path}: `init_lora_weights` {config['init_lora_weights']!r} changed the base model's weights too, so the "
            f"adapter does not fit the plain ones; {REMEDY}."
        )
    unknown = sorted(key for key, value in config.items() if value and key not in _HARMLESS)
    if unknown:
        raise CheckpointError(f"{path} uses `{unknown[0]}`, a LoRA variant that is not read; {REMEDY}.")
    patterns = [config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
    numbers = [config.get("r", 8), config.get("lora_alpha", 8)]
    if all(isinstance(pattern, dict) for pattern in patterns):
        numbers += [value for pattern in patterns for value in pattern.values()]
    else:
        numbers.append(None)
    if not all(isinstance(number, (int, float)) and number > 0 for number in numbers):
        raise CheckpointError(f"{path}: ranks and alphas must be positive numbers, got {numbers}; fetch it again.")
    return config


def value_by_pattern(pattern: Mapping[str, int] | None, module: str, default: int) -> int:
    """The value of the first pattern that a module's path ends with, as peft reads them."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(?:.*\.)?(?:{key})$", module):
            return value
    return default
