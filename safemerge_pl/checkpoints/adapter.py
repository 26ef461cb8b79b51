"""PEFT LoRA folders as models: W + scale * B A over the base model."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from safemerge_pl.architectures.embeddings import is_tied_candidate
from safemerge_pl.architectures.layers import known_layers, parts_of, vision_only
from safemerge_pl.checkpoints.adapted import BoundAdapter, Delta
from safemerge_pl.checkpoints.adapter_config import ADAPTER_CONFIG, REMEDY, value_by_pattern
from safemerge_pl.checkpoints.layouts import layer_index
from safemerge_pl.checkpoints.names import match_names, names_alike
from safemerge_pl.checkpoints.tensors import Checkpoint, View
from safemerge_pl.errors import CheckpointError
from safemerge_pl.runtime.files import local_path

__all__ = ["Adapter"]

_FACTOR = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?P<bias>\.bias)?(?:\.weight)?"
)
_OTHER_FACTOR = re.compile(
    r"\.(?:lora_\w+|token_adapter|hada_\w+|lokr_\w+|ia3_l|oft_\w+|boft_\w+|vera_\w+|prompt_\w+)(?:\.|$)"
)

_TWICE_UP_TO = [0, 21]
"""Last version of peft that is known to add the output projection of an adapted attention twice."""


class Adapter(View):
    """The tensors of a LoRA adapter; :meth:`bind` makes a model of them.

    Args:
        tensors: the adapter's file.
        config: its settings, from :func:`read_adapter_config`.
    """

    def __init__(self, tensors: Checkpoint, config: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self.config = dict(config)
        self._modules, self._whole = self._sorted()
        self._twice = {module for module in self._modules if self._is_added_twice(module)}

    def bind(self, base: Checkpoint) -> BoundAdapter:
        """The fine-tuned model: the base with the adapter's products added and its saved modules in place.

        Args:
            base: the model that the adapter was trained on, in any layout.

        Raises:
            CheckpointError: if a tensor of the adapter belongs to none of the base, or does not fit it.
        """
        modules, whole = self._modules, self._whole
        targets = {_weight_name(module, base): module for module in modules}
        biases = {f"{module}.bias": module for module, factors in modules.items() if "bias" in factors}
        wanted = [*targets, *biases, *(name for name in whole if name not in targets and name not in biases)]
        deltas: dict[str, list[Delta]] = defaultdict(list)
        try:
            names = self._place(wanted, targets, base)
        except CheckpointError as error:
            names = {}
            deltas |= self._across(modules, targets, base, error)
        for name, module in targets.items():
            if name in names:
                deltas[names[name]].append(self._delta(module, modules[module], name, names[name], base))
        for name, module in biases.items():
            if name in names:
                factors = modules[module]
                deltas[names[name]].append(Delta(self._scale(module, factors), {"bias": factors["bias"]}))
        replaced = {names[name]: key for name, key in whole.items() if name in names}
        missing = [name for name in wanted if name not in names] if names else list(whole)
        notes = (*self.notes, *_ignored(missing), *self._base_note(base))
        return BoundAdapter(self, base, deltas, replaced, notes)

    def _sorted(self) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        """Factors by module, and whole tensors (biases, saved modules), all by the base's names."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        whole: dict[str, str] = {}
        for key in self:
            name = re.sub(r"^(?:(?:module|_orig_mod)\.)*base_model\.model\.", "", key)
            name = re.sub(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.)", "", name)
            factor = _FACTOR.fullmatch(name)
            if factor:
                modules[factor["module"]]["bias" if factor["bias"] else factor["kind"]] = key
            elif _OTHER_FACTOR.search(name):
                raise CheckpointError(f"{self.source}: `{key}` is no part of a plain LoRA adapter; {REMEDY}.")
            else:
                whole[name] = key
        for module, factors in modules.items():
            if not (
                {"lora_A", "lora_B"} <= factors.keys() or {"lora_embedding_A", "lora_embedding_B"} <= factors.keys()
            ):
                raise CheckpointError(
                    f"{self.source}: `{module}` has only {', '.join(factors.values())}; save it again."
                )
        if not modules:
            raise CheckpointError(
                f"{self.source} holds no LoRA factors, only {len(whole)} other tensors; save it again."
            )
        return dict(modules), whole

    def _is_added_twice(self, module: str) -> bool:
        """Whether peft adds this product twice, in training as in merging (huggingface/peft#3774).

        It does so to the output projection of an ``nn.MultiheadAttention`` that is adapted as a whole, as in open_clip.
        """
        if not any(".base_layer.out_proj." in key for key in self._modules[module].values()):
            return False
        version = str(self.config.get("peft_version") or "0")
        if [int(number) for number in re.findall(r"\d+", version)[:2]] > _TWICE_UP_TO:
            raise CheckpointError(
                f"{self.source}: whether peft {version} adds `{module}` once or twice is not known here; {REMEDY}."
            )
        return True

    def _place(self, wanted: list[str], targets: Mapping[str, str], base: Checkpoint) -> dict[str, str]:
        """The base's name of each tensor; those without one are left out where that is no mistake."""
        if set(wanted) <= base.keys():
            return {name: name for name in wanted}
        saved = self.config.get("modules_to_save") or []
        tower = set(vision_only(wanted))  # a pretrained vision tower has no place for the text tower's factors
        must = [name for name in wanted if name in tower and not (is_tied_candidate(name) or _is_saved(name, saved))]
        if not any(name in targets for name in must):
            must = [name for name in wanted if name in targets]
        names = match_names(must, base)
        return names | names_alike(names, [name for name in wanted if name not in names], base)

    def _across(
        self,
        modules: Mapping[str, dict[str, str]],
        targets: Mapping[str, str],
        base: Checkpoint,
        reason: CheckpointError,
    ) -> dict[str, list[Delta]]:
        """Factors for a base in another library's layout, piece by piece."""
        index = layer_index(base)
        deltas: dict[str, list[Delta]] = defaultdict(list)
        for name in vision_only(targets):
            factors = modules[targets[name]]
            parts = parts_of(name, self._target_shape(name, factors))
            places = [index.get(part.name) for part in parts]
            if not parts or factors.keys() != {"lora_A", "lora_B"} or None in places:
                raise CheckpointError(
                    f"{self.source}: the adapter's `{targets[name]}` has no place in {base.source}: {reason}"
                ) from reason
            for part, place in zip(parts, places, strict=True):
                assert place is not None
                if part.shape != place.shape:
                    raise CheckpointError(
                        f"{self.source}: the adapter's `{targets[name]}` is for a matrix of shape {part.shape}, "
                        f"`{place.parameter}` in {base.source} has {place.shape}: is it an adapter of this model?"
                    )
                deltas[place.parameter].append(
                    Delta(self._scale(targets[name], factors), factors, place.transposed, place.rows, part.rows)
                )
        return deltas

    def _target_shape(self, name: str, factors: Mapping[str, str]) -> tuple[int, ...]:
        """Shape of the tensor that factors were trained for."""
        if not {"lora_A", "lora_B"} <= factors.keys():
            return ()
        shape = (self.shape(factors["lora_B"])[0], *self.shape(factors["lora_A"])[1:])
        return shape[::-1] if _is_turned(name, shape[::-1], self.config) else shape

    def _scale(self, module: str, factors: Mapping[str, str]) -> float:
        """Alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski 2023), by the module's own rank and alpha."""
        rank = value_by_pattern(self.config.get("rank_pattern"), module, self.config.get("r", 8))
        alpha = value_by_pattern(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", 8))
        name = factors.get("lora_A") or factors["lora_embedding_A"]
        if rank != self.shape(name)[0]:
            raise CheckpointError(
                f"{self.source}: `{name}` has rank {self.shape(name)[0]}, {ADAPTER_CONFIG} says {rank}; they are "
                "not of one adapter."
            )
        scale: float = alpha / (rank**0.5 if self.config.get("use_rslora") else rank)
        return 2 * scale if module in self._twice else scale

    def _delta(self, module: str, factors: dict[str, str], name: str, theirs: str, base: Checkpoint) -> Delta:
        factors = {kind: key for kind, key in factors.items() if kind != "bias"}
        shape = base.shape(theirs)
        embedding = "lora_embedding_A" in factors
        if embedding and "lora_magnitude_vector" in factors:
            raise CheckpointError(f"{self.source}: `{module}` is an embedding under DoRA, which is not read; {REMEDY}.")
        down = self.shape(factors["lora_embedding_A" if embedding else "lora_A"])
        up = self.shape(factors["lora_embedding_B" if embedding else "lora_B"])
        turned = embedding or _is_turned(name, shape, self.config)
        product = (up[0], *down[1:])
        if len(down) != len(shape) or (product[::-1] if turned else product) != shape or up[1] != down[0]:
            raise CheckpointError(
                f"{self.source}: the factors of `{module}`, {up} and {down}, do not fit `{theirs}` of shape {shape} in "
                f"{base.source}; if they were trained on this model, {REMEDY}."
            )
        return Delta(self._scale(module, factors), factors, turned)

    def _base_note(self, base: Checkpoint) -> list[str]:
        """A sentence if the adapter names another base model than the one it is put on (G8)."""
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


def _ignored(missing: list[str]) -> list[str]:
    """A sentence on tensors that the pretrained model has no place for."""
    if not missing:
        return []
    return [f"{len(missing)} tensors of the adapter have no place in the pretrained model, first `{missing[0]}`"]


def _weight_name(module: str, base: Checkpoint) -> str:
    """The tensor that a module's factors are added to; a fused attention keeps its weight under another name."""
    fused = f"{module}.in_proj_weight"
    ending = f"{module.rpartition('.')[2]}.in_proj_weight"
    return fused if known_layers([fused]) or any(name.endswith(ending) for name in base) else f"{module}.weight"


def _is_turned(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> bool:
    """Whether a matrix is stored as ``(d_in, d_out)``: by its family where that is known, else by the adapter."""
    if len(shape) != 2:
        return False
    parts = parts_of(name, shape) if known_layers([name]) else []
    return parts[0].transposed if parts else bool(config.get("fan_in_fan_out"))


def _is_saved(name: str, saved: Iterable[str]) -> bool:
    return any(f".{name}".rpartition(".")[0].endswith(f".{module}") or f".{module}." in f".{name}" for module in saved)


def _model_name(source: str) -> str:
    """The part of a path, cache path or hub id that names the model."""
    cached = re.search(r"models--[^/\\]*?--([^/\\]+)", source)
    name = cached[1] if cached else re.split(r"[/\\]", source.rstrip("/\\"))[-1]
    return name.partition("@")[0].casefold()
