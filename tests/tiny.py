"""Tiny models with random weights, built offline, and fine-tunes of them."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from safemerge_pl.checkpoints import CheckpointError, Source
from safemerge_pl.merger import ContinualMerger, FoldReport
from safemerge_pl.methods import MergeMethod, SafeMerge, Stack, StackResult

Tensors = dict[str, Tensor]
VISION = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 8,
}
TEXT = VISION | {
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "max_position_embeddings": 8,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FC1 = "encoder.layers.0.mlp.fc1.weight"
CLIP_NAMES = [f"vision.{layer}.{part}" for layer in range(2) for part in ("q", "k", "v", "out", "up")]


@dataclass
class Add(MergeMethod):
    """Adds task vectors; its result can be worked out by hand."""

    label = "Add"
    scaling: float = 1.0

    def fold_stack(self, stack: Stack) -> StackResult:
        return StackResult(stack.merged + self.scaling * stack.task_vector)


def fast_method(**settings: Any) -> SafeMerge:
    """SAFE-Merge in few steps, with ranks that fit the tiny models."""
    return SafeMerge(**({"scoring_rank": 4, "recovery_rank": 3, "task_rank": 2, "num_steps": 3} | settings))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tower(prefix: str = "", *, layers: int = 2, width: int = 8, dtype: torch.dtype = torch.float32) -> Tensors:
    """A CLIP vision tower by name, as transformers 5 has it (without ``prefix``) or as older files have it."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.patch_embedding.weight": (width, 3, 4, 4),
        "embeddings.position_embedding.weight": (5, width),
        "pre_layrnorm.weight": (width,),
    }
    for layer in range(layers):
        block = f"encoder.layers.{layer}"
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            shapes[f"{block}.self_attn.{part}.weight"] = (width, width)
            shapes[f"{block}.self_attn.{part}.bias"] = (width,)
        shapes |= {f"{block}.layer_norm1.weight": (width,), f"{block}.mlp.fc1.weight": (2 * width, width)}
        shapes |= {f"{block}.mlp.fc1.bias": (2 * width,), f"{block}.mlp.fc2.weight": (width, 2 * width)}
    tensors = {prefix + name: (0.1 * randn(*shape, seed=i)).to(dtype) for i, (name, shape) in enumerate(shapes.items())}
    tensors[prefix + "embeddings.position_ids"] = torch.arange(5)[None]
    return tensors


def tuned(tensors: Mapping[str, Tensor], seed: int, scale: float = 0.01) -> Tensors:
    """A fine-tune: seeded noise on every floating-point tensor, rounded to its dtype."""
    found = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        noise = scale * randn(*tensor.shape, seed=1000 * seed + i)
        found[name] = (
            (tensor.detach().float() + noise).to(tensor.dtype) if tensor.is_floating_point() else tensor.clone()
        )
    return found


def renamed(tensors: Mapping[str, Tensor], old: str, new: str) -> Tensors:
    """Every name with its first ``old`` (``""``: its start) replaced by ``new``."""
    return {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}


def only_weights(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the ten matrices that are merged in :func:`tower`."""
    return [name for name in tensors if name.endswith(("_proj.weight", "fc1.weight"))]


def folder_of(path: Path, tensors: Mapping[str, Tensor], **files: Any) -> Path:
    """A model folder: ``model.safetensors`` and JSON files by the name before the dot."""
    path.mkdir(parents=True)
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content, indent=2))
    return path


def as_file(tensors: Tensors, path: Path) -> Path:
    save_file(tensors, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def fresh(pretrained: Source | None = None, **settings: Any) -> ContinualMerger:
    return ContinualMerger(tower() if pretrained is None else pretrained, fast_method(**settings))


def folded(*seeds: int, pretrained: Tensors | None = None, **settings: Any) -> ContinualMerger:
    base = tower() if pretrained is None else pretrained
    merger = fresh(base, **settings)
    for seed in seeds:
        merger.fold(tuned(base, seed), f"task{seed}")
    return merger


def refused(merger: ContinualMerger, incoming: Source, task: str = "new") -> str:
    """The message of a refusal that changes nothing."""
    before = merger.fingerprint(), merger.tasks
    with pytest.raises(CheckpointError) as caught:
        merger.fold(incoming, task)
    assert (merger.fingerprint(), merger.tasks) == before
    assert str(caught.value).startswith(f"task '{task}': ")
    return str(caught.value)


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Equal bit for bit: names, dtypes, shapes, values (and the sign of zero)."""
    assert sorted(left) == sorted(right)
    for name, tensor in left.items():
        other = right[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert torch.equal(tensor, other), name
        if tensor.is_floating_point():
            assert torch.equal(tensor.signbit(), other.signbit()), name


def copied(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def watch_files(monkeypatch: Any, opened: Callable[[Path], Any], read: Callable[[str], Any]) -> None:
    """From now on be told of every safetensors file that is opened and every tensor that is read, before it is."""
    real = safetensors.safe_open

    class Watched:
        def __init__(self, path: Path, **settings: Any) -> None:
            opened(Path(path))
            self.handle = real(path, **settings)

        def __enter__(self) -> "Watched":
            self.handle.__enter__()
            return self

        def __exit__(self, *exception: Any) -> None:
            self.handle.__exit__(*exception)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.handle, name)

        def get_tensor(self, name: str) -> Tensor:
            read(name)
            tensor: Tensor = self.handle.get_tensor(name)
            return tensor

    monkeypatch.setattr(safetensors, "safe_open", Watched)


def refuse_to_read(monkeypatch: Any) -> None:
    """From now on the header of a safetensors file can be looked at, but no tensor can be read."""

    def refuse(name: str) -> None:
        raise AssertionError("a tensor was read")

    watch_files(monkeypatch, lambda path: None, refuse)


def hf_vision_model() -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    with seeded():
        return CLIPVisionModel(CLIPVisionConfig(**VISION, image_size=8, patch_size=4)).eval()


def hf_vision() -> nn.Module:
    return tower_of(hf_vision_model())


def tower_of(model: nn.Module) -> nn.Module:
    """The vision tower in a ``CLIPModel`` or ``CLIPVisionModel``; the latter is the tower from transformers 5.6 on."""
    tower: nn.Module = getattr(model, "vision_model", model)
    return tower


def hf_clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    vision = VISION | {"image_size": 8, "patch_size": 4}
    with seeded():
        return CLIPModel(CLIPConfig(vision_config=vision, text_config=TEXT, projection_dim=8)).eval()


def hf_t5(feed_forward: str = "gated-gelu", **settings: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {
        "d_model": 8,
        "d_ff": 16,
        "num_layers": 2,
        "num_decoder_layers": 1,
        "num_heads": 2,
        "d_kv": 4,
        "vocab_size": 16,
    }
    with seeded():
        return T5ForConditionalGeneration(T5Config(**sizes, feed_forward_proj=feed_forward, **settings)).eval()


def hf_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16}
    with seeded():
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=2)).eval()


def hf_mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "vocab_size": 16,
        "num_local_experts": 4,
    }
    with seeded():
        return MixtralForCausalLM(
            MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=4)
        ).eval()


def hf_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    with seeded():
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval()


def open_clip_model() -> nn.Module:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=8, head_width=4, mlp_ratio=2.0, patch_size=4, image_size=8)
    text = CLIPTextCfg(context_length=8, vocab_size=16, width=8, heads=2, layers=1)
    with seeded():
        return CLIP(embed_dim=8, vision_cfg=vision, text_cfg=text, quick_gelu=True).eval()


def timm_vit() -> nn.Module:
    import timm

    sizes = {"img_size": 32, "depth": 2, "embed_dim": 12, "num_heads": 3, "num_classes": 4}
    with seeded():
        return timm.create_model("vit_tiny_patch16_224", pretrained=False, **sizes).eval()


@contextmanager
def seeded() -> Iterator[None]:
    """A fixed global seed inside, the earlier random state afterwards; transformers says nothing."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            yield
        finally:
            logger.setLevel(level)


def notes_but_head(report: FoldReport) -> tuple[str, ...]:
    """What a fold notes, but for a trained head that stays pretrained, as every model with a head has it."""
    return tuple(note for note in report.notes if not note.startswith("its head was trained"))
