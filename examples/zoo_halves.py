"""Data for the examples: the embedded zoo's images, half of each set to train on and half to test on.

The package ships test splits only, so an honest example has to divide them: even rows train, odd rows test. The
accuracies are therefore not comparable with those in the zoo's own README.
"""

import argparse
import re
from functools import partial

import datasets
import timm
import torch
from pyarrow import parquet
from torch import nn
from torch.utils.data import TensorDataset
from transformers import CLIPImageProcessor

from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.zoo import Zoo


def halves(name: str, limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Pixels ``(N, 3, 32, 32)`` and labels ``(N,)`` to train on and to test on."""
    rows = datasets.Dataset(parquet.read_table(Zoo().data(name)))
    rows = rows.shuffle(seed=0).select(range(min(len(rows), limit or len(rows))))
    processor = CLIPImageProcessor.from_pretrained(Zoo().model)
    pixels = processor([image.convert("RGB") for image in rows["image"]], return_tensors="pt")["pixel_values"]
    labels = torch.tensor(rows["label"])
    return TensorDataset(pixels[::2], labels[::2]), TensorDataset(pixels[1::2], labels[1::2])


def classes(name: str) -> list[str]:
    """Class names in label order."""
    return list(Zoo().describe(name)["classes"])


def timm_tower() -> nn.Module:
    """The zoo's pretrained vision tower as a timm transformer: pixels to features ``(N, 128)``."""
    clip = CLIPBackbone("zoo")
    clip.load()
    names = {"embeddings.class_embedding": "cls_token", "embeddings.position_embedding.weight": "pos_embed"}
    names |= {"embeddings.patch_embedding": "patch_embed.proj", "encoder.layers": "blocks", "layer_norm": "norm"}
    names |= {"pre_layrnorm": "norm_pre", "post_layernorm": "norm", "self_attn.out_proj": "attn.proj"}
    weights: dict[str, torch.Tensor] = {}
    for part in ("q_proj", "k_proj", "v_proj", ""):  # timm keeps the three in one matrix, in this order
        for name, tensor in clip.vision_model.state_dict().items():
            if part in name and (part or not re.search("[qkv]_proj", name)):
                for old, new in {**names, f"self_attn.{part}": "attn.qkv"}.items():
                    name = name.replace(old, new)
                weights[name] = torch.cat([weights[name], tensor]) if name in weights else tensor
    shape = {"img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 6, "num_heads": 4, "num_classes": 0}
    norm = partial(nn.LayerNorm, eps=1e-5)
    tower = timm.create_model("vit_tiny_patch16_224", **shape, pre_norm=True, act_layer="quick_gelu", norm_layer=norm)
    tower.load_state_dict({name: tensor.view_as(tower.state_dict()[name]) for name, tensor in weights.items()})
    return tower


def length(description: str) -> tuple[int, int]:
    """Epochs a task and images a set, as the command line asks for them."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: one epoch a task on few images")
    return (1, 64) if parser.parse_args().quick else (5, 600)


def show(title: str, rows: list[dict[str, float]]) -> None:
    """The accuracy matrix: a row after each task, a column a task."""
    tasks = list(rows[-1])
    print(f"\n{title} (accuracy in %)\n" + " " * 22 + "".join(f"{task[:12]:>14}" for task in tasks) + f"{'mean':>10}")
    for task, row in zip(tasks, rows, strict=True):
        cells = "".join(f"{100 * row[name]:>14.1f}" for name in tasks)
        seen = [row[name] for name in tasks[: tasks.index(task) + 1]]
        print(f"after {task:<16}{cells}{100 * sum(seen) / len(seen):>10.1f}")
    print("(mean: over the tasks trained so far)")
