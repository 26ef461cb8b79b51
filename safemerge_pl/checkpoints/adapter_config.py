"""Read the settings of a PEFT adapter, and refuse by name what would change its meaning and is not known here."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safemerge_pl.checkpoints.adapter_types import ADAPTER_TYPES, COMMON_SETTINGS
from safemerge_pl.errors import CheckpointError

__all__ = ["ADAPTER_CONFIG", "REMEDY", "read_adapter_config", "value_by_pattern"]

ADAPTER_CONFIG = "adapter_config.json"
REMEDY = "merge it into its base model with peft's merge_and_unload() and give the saved result"

_MOVES_BASE = re.compile(r"pissa|olora|corda|loftq|lora_ga", re.IGNORECASE)
"""Initialisations that also change the base weights, which the adapter's factors are then relative to."""


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Read the settings of an adapter that can be merged.

    Raises:
        CheckpointError: if it is damaged, of another type, or uses a variant that is not known here.
    """
    try:
        config: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} is no adapter configuration ({error}); fetch it again.") from error
    adapter_type = ADAPTER_TYPES.get(str(config.get("peft_type")))
    if adapter_type is None:
        raise CheckpointError(
            f"{path.parent} is a PEFT adapter of type {config.get('peft_type')}, only {' and '.join(ADAPTER_TYPES)} is "
            f"read; {REMEDY}."
        )
    if _MOVES_BASE.match(str(config.get("init_lora_weights"))):
        raise CheckpointError(
            f"{path}: `init_lora_weights` {config['init_lora_weights']!r} changed the base model's weights too, so the "
            f"adapter does not fit the plain ones; {REMEDY}."
        )
    unknown = sorted(
        key for key, value in config.items() if value and key not in adapter_type.settings | COMMON_SETTINGS
    )
    if unknown:
        raise CheckpointError(f"{path} uses `{unknown[0]}`, a LoRA variant that is not read; {REMEDY}.")
    patterns = [config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
    numbers = [config.get("r", 8), config.get(adapter_type.alpha, 8)]
    if all(isinstance(pattern, dict) for pattern in patterns):
        numbers += [value for pattern in patterns for value in pattern.values()]
    else:
        numbers.append(None)
    if not all(isinstance(number, (int, float)) and number > 0 for number in numbers):
        raise CheckpointError(f"{path}: ranks and alphas must be positive numbers, got {numbers}; fetch it again.")
    for key in (key for pattern in patterns for key in pattern):
        try:
            re.compile(key)
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{path}: `{key[:200]}` is no pattern of module names ({error}).") from error
    return config


def value_by_pattern(pattern: Mapping[str, int] | None, module: str, default: int) -> int:
    """Give the value of the first pattern that a module's path ends with, as peft does; else the default."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(?:.*\.)?(?:{key})$", module):
            return value
    return default
