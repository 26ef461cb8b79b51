"""Read a PEFT adapter: its factors by module, its whole tensors, and the scale of each update."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safemerge_pl.checkpoints.adapter_config import ADAPTER_CONFIG, REMEDY, value_by_pattern
from safemerge_pl.checkpoints.adapter_types import ADAPTER_TYPES, MAGNITUDE, FactorKind
from safemerge_pl.checkpoints.tensors import Checkpoint, View
from safemerge_pl.errors import CheckpointError
from safemerge_pl.runtime.files import local_path

__all__ = ["Adapter", "Factors"]

_OTHER_FACTOR = re.compile(
    r"\.(?:lora_\w+|token_adapter|hada_\w+|lokr_\w+|ia3_l|oft_\w+|boft_\w+|vera_\w+|prompt_\w+)(?:\.|$)"
)
"""Tensors of adapters that no kind of factor here has."""

_TWICE_UP_TO = [0, 21]
"""Last version of peft that is known to add the output projection of an adapted attention twice."""


@dataclass(frozen=True)
class Factors:
    """The tensors of an adapter that belong to one module.

    Attributes:
        kind: how they make an update.
        keys: their names in the adapter, by the names of the kind; :data:`MAGNITUDE` may be among them.
        bias: name of the update of the module's bias, if there is one.
    """

    kind: FactorKind
    keys: Mapping[str, str]
    bias: str | None = None


class Adapter(View):
    """The tensors of an adapter; :func:`~safemerge_pl.checkpoints.adapted.bind` makes a model of them and a base.

    Args:
        tensors: the adapter's file.
        config: its settings, from :func:`read_adapter_config`.

    Attributes:
        config: see above.
        modules: factors by the base's name of the module.
        whole: biases and saved modules by the base's name of the tensor -> name in the adapter.

    Raises:
        CheckpointError: if it holds no factors, only some of a module's, or tensors of another type of adapter.
    """

    def __init__(self, tensors: Checkpoint, config: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self.config = dict(config)
        self._type = ADAPTER_TYPES[self.config["peft_type"]]
        found, self.whole = self._sort_tensors()
        self.modules = {module: self._factors(module, keys) for module, keys in found.items()}
        self._twice = {module for module in self.modules if self._is_added_twice(module)}

    def scale(self, module: str) -> float:
        """Factor of a module's update, by the module's own rank and alpha.

        Alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski 2023).

        Raises:
            CheckpointError: if the factors have another rank than the settings say.
        """
        factors = self.modules[module]
        rank = value_by_pattern(self.config.get("rank_pattern"), module, self.config.get("r", 8))
        alpha = value_by_pattern(self.config.get("alpha_pattern"), module, self.config.get(self._type.alpha, 8))
        name = factors.keys[factors.kind.ranked]
        if rank != self.shape(name)[0]:
            raise CheckpointError(
                f"{self.source}: `{name}` has rank {self.shape(name)[0]}, {ADAPTER_CONFIG} says {rank}; they are "
                "not of one adapter."
            )
        scale: float = alpha / (rank**0.5 if self.config.get("use_rslora") else rank)
        return 2 * scale if module in self._twice else scale

    def factor_shapes(self, module: str) -> dict[str, tuple[int, ...]]:
        """Shape of each factor of a module, in the order of its kind."""
        factors = self.modules[module]
        return {name: self.shape(factors.keys[name]) for name in factors.kind.factors}

    def base_notes(self, base: Checkpoint) -> list[str]:
        """A sentence if the adapter names another base model than the one it is put on: its update may mean nothing."""
        named = str(self.config.get("base_model_name_or_path") or "")
        if not named or base.folder is None or local_path(named).absolute() == base.folder.absolute():
            return []
        revision, given = self.config.get("revision"), re.search(r"@([^@]+)$", base.source)
        if revision and given and revision != given[1]:
            return [f"the adapter was trained on revision {revision} of its base, and is put on `{base.source}` here"]
        ours = {_model_name(base.source), _model_name(str(base.folder)), _model_name(str(base.folder.resolve()))}
        if _model_name(named) in ours:
            return []
        return [f"the adapter was trained on `{named}`, and is put on `{base.source}` here: are they the same model?"]

    def _sort_tensors(self) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        """Factors by module, and whole tensors (biases, saved modules), all by the base's names."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        whole: dict[str, str] = {}
        known = "|".join([*(name for kind in self._type.kinds for name in kind.factors), MAGNITUDE])
        pattern = rf"(?P<module>.+)\.(?P<name>{known})(?:\.default)?(?P<bias>\.bias)?(?:\.weight)?"
        for key in self:
            if ".original_module." in key:  # what a saved module replaces, which peft keeps beside it
                continue
            name = re.sub(r"^(?:(?:module|_orig_mod)\.)*base_model\.model\.", "", key)
            name = re.sub(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.)", "", name)
            factor = re.fullmatch(pattern, name)
            if factor:
                modules[factor["module"]]["bias" if factor["bias"] else factor["name"]] = key
            elif _OTHER_FACTOR.search(name):
                raise CheckpointError(f"{self.source}: `{key}` is no part of a plain LoRA adapter; {REMEDY}.")
            else:
                whole[name] = key
        if not modules:
            raise CheckpointError(
                f"{self.source} holds no LoRA factors, only {len(whole)} other tensors; save it again."
            )
        return dict(modules), whole

    def _factors(self, module: str, keys: dict[str, str]) -> Factors:
        """A module's tensors as factors of the first kind of which none is missing."""
        kind = next((kind for kind in self._type.kinds if keys.keys() >= set(kind.factors)), None)
        if kind is None:
            raise CheckpointError(f"{self.source}: `{module}` has only {', '.join(keys.values())}; save it again.")
        return Factors(kind, {name: key for name, key in keys.items() if name != "bias"}, keys.get("bias"))

    def _is_added_twice(self, module: str) -> bool:
        """Whether peft adds this product twice, in training as in merging (huggingface/peft#3774).

        It does so to the output projection of an ``nn.MultiheadAttention`` that is adapted as a whole, as in open_clip.
        """
        if not any(".base_layer.out_proj." in key for key in self.modules[module].keys.values()):
            return False
        version = str(self.config.get("peft_version") or "0")
        if [int(number) for number in re.findall(r"\d+", version)[:2]] > _TWICE_UP_TO:
            raise CheckpointError(
                f"{self.source}: whether peft {version} adds `{module}` once or twice is not known here; {REMEDY}."
            )
        return True


def _model_name(source: str) -> str:
    """The part of a path, cache path or hub id that names the model."""
    cached = re.search(r"models--[^/\\]*?--([^/\\]+)", source)
    name = cached[1] if cached else re.split(r"[/\\]", source.rstrip("/\\"))[-1]
    return name.partition("@")[0].casefold()
