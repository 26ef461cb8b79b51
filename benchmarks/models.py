"""Random models of the sizes that matter, with spectra that fall as those of real weights and fine-tunes do."""

import torch
from torch import Tensor

__all__ = ["decaying", "vit"]


def decaying(*shape: int, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """Gaussian entries whose columns shrink to a twentieth squared: singular values fall by some hundredfold."""
    return scale * torch.randn(*shape, generator=generator) * torch.linspace(1, 0.05, shape[-1]).square()


def vit(seed: int, base: dict[str, Tensor] | None = None, *, blocks: int = 12, width: int = 768) -> dict[str, Tensor]:
    """Every matrix and vector of a CLIP vision tower's blocks by its name in transformers; or a fine-tune of one."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embeddings.position_embedding.weight": (50, width)}
    for block in range(blocks):
        prefix = f"encoder.layers.{block}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= {f"{prefix}.self_attn.{name}.weight": (width, width), f"{prefix}.self_attn.{name}.bias": (width,)}
        shapes |= {f"{prefix}.mlp.fc1.weight": (4 * width, width), f"{prefix}.mlp.fc1.bias": (4 * width,)}
        shapes |= {f"{prefix}.mlp.fc2.weight": (width, 4 * width), f"{prefix}.mlp.fc2.bias": (width,)}
        for norm in ("layer_norm1", "layer_norm2"):
            shapes |= {f"{prefix}.{norm}.weight": (width,), f"{prefix}.{norm}.bias": (width,)}
    if base is None:
        return {name: decaying(*shape, generator=generator) for name, shape in shapes.items()}
    return {name: base[name] + decaying(*shape, generator=generator, scale=0.01) for name, shape in shapes.items()}
