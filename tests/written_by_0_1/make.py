"""What version 0.1.0 wrote, kept to see that later versions read it. usage: make.py FOLDER (with that version)

Models are random and tiny; the study's experts are copied with a fixed date, since cells are kept under it.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import safemerge_pl as sm
from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.callbacks import SAFEMergeCallback
from safemerge_pl.data import ZooData
from safemerge_pl.study import Study, StudyRow
from safemerge_pl.zoo import FILES

RANKS: dict[str, Any] = {"scoring_rank": 4, "recovery_rank": 3, "task_rank": 2, "num_steps": 3}
METHODS: dict[str, Any] = {
    "safe_merge": lambda: sm.SafeMerge(**RANKS),
    "task_arithmetic": lambda: sm.TaskArithmetic(scaling=1.0),
    "opcm": lambda: sm.OPCM(),
    "ties": lambda: sm.TiesMerging(),
}
TASKS, PROBE = ["font_category", "weather"], ["clipart_category"]
DATE = 1_700_000_000


def tensors(seed: int) -> dict[str, Tensor]:
    """A base (0) or a fine-tune of it."""
    shapes = {"q_proj": (8, 8), "k_proj": (8, 8), "v_proj": (8, 8), "out_proj": (8, 8)}
    names = {f"encoder.layers.{i}.self_attn.{k}.weight": s for i in range(2) for k, s in shapes.items()}
    names |= {f"encoder.layers.{i}.mlp.fc1.weight": (16, 8) for i in range(2)}
    names |= {"embeddings.position_embedding.weight": (5, 8), "post_layernorm.bias": (8,)}

    def randn(number: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(number))

    base = {name: 0.1 * randn(i, shape) for i, (name, shape) in enumerate(names.items())}
    if not seed:
        return base
    return {name: t + 0.01 * randn(1000 * seed + i, tuple(t.shape)) for i, (name, t) in enumerate(base.items())}


class Loop(L.LightningModule):
    """A loop of somebody who knows nothing of merging."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        for i, parameter in enumerate(self.part.parameters()):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return (self.part(batch[0]) - batch[1]).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)

    def train_dataloader(self) -> Any:
        rows = torch.arange(32.0).view(8, 4) / 32 + self.current_epoch
        return DataLoader(TensorDataset(rows, rows.flip(0)), 4)


def live_callback() -> SAFEMergeCallback:
    return SAFEMergeCallback(epochs_per_task=1, module_attr="part", layers=["*weight"], tasks=["a", "b", "c"], **RANKS)


def trainer(callback: L.Callback, epochs: int, **options: Any) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    return L.Trainer(max_epochs=epochs, callbacks=[callback], reload_dataloaders_every_n_epochs=1, **quiet, **options)


def save_clip(folder: Path) -> None:
    """A CLIP of width 8 and two experts; the tokenizer is the zoo's and not kept twice."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPVisionModel

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "projection_dim": 8}
    vision = {**sizes, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
    text = {**sizes, "num_hidden_layers": 1, "vocab_size": 8192, "max_position_embeddings": 32}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=8))
    model.half().save_pretrained(folder / "clip")
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(
        folder / "clip"
    )
    for task in TASKS:
        expert = CLIPVisionModel(model.config.vision_config)
        known = model.vision_model.state_dict()
        prefix = next(iter(expert.state_dict())).partition("embeddings.")[0]
        noise = {n: 0.01 * torch.randn(t.shape) if t.is_floating_point() else 0 for n, t in known.items()}
        expert.load_state_dict({prefix + n: (t.float() + noise[n]).to(t.dtype) for n, t in known.items()})
        expert.save_pretrained(folder / "clip_experts" / task)


def with_tokenizer(clip: Path) -> Path:
    for file in FILES.glob("model/tokenizer*"):
        shutil.copy(file, clip)
    return clip


def stream_parts(clip: Path, places: Path) -> tuple[sm.ContinualMergeModule, SAFEMergeCallback]:
    """Paths are those of the day, so a resumed module is given its backbone anew."""
    module = sm.ContinualMergeModule(CLIPBackbone(str(clip)))
    return module, SAFEMergeCallback(experts=str(places / "{task}"), **RANKS)


def few_images(tasks: list[str], controls: list[str]) -> ZooData:
    class Few(ZooData):
        def load_set(self, name: str) -> Any:
            whole = super().load_set(name)
            return type(whole)(whole.name, whole.rows.select(range(20)), whole.classes, whole.templates)

    return Few(tasks=tasks, controls=controls, batch_size=20)


def experts(folder: Path) -> Path:
    """The zoo's experts under a relative path with a fixed date."""
    for task in TASKS:
        shutil.copytree(FILES / "experts" / task, folder / task)
        for file in (folder / task).iterdir():
            os.utime(file, (DATE, DATE))
    return folder


def small_study(folder: str) -> Study:
    rows = [StudyRow("SAFE-Merge", sm.SafeMerge(**RANKS)), StudyRow("OPCM", sm.OPCM(), vary={"alpha": [0.5, 0.6]})]
    data = few_images(TASKS, PROBE)
    return Study(CLIPBackbone(), {"two": data}, rows, experts="experts/{task}", orders=[42], folder=folder)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(4):
        save_file(tensors(seed), folder / f"model{seed}.safetensors")
    known: dict[str, Any] = {}
    for name, build in METHODS.items():
        merger = sm.ContinualMerger(folder / "model0.safetensors", build())
        for seed in (1, 2):
            merger.fold(folder / f"model{seed}.safetensors", f"task{seed}")
        merger.save(folder / name)
        known[name] = {"merged": merger.fingerprint(), "ledger": list(merger.ledger)}
        merger.fold(folder / "model3.safetensors", "task3")
        known[name]["continued"] = merger.fingerprint()
        save_file(dict(merger.merged), folder / f"{name}_continued.safetensors")
    callback, module = live_callback(), Loop()
    run = trainer(callback, 1)
    run.fit(module)
    run.save_checkpoint(folder / "live.ckpt", weights_only=False)
    callback, module = live_callback(), Loop()
    trainer(callback, 3).fit(module, ckpt_path=folder / "live.ckpt")
    known["live"] = callback.merger.fingerprint()
    save_file({n: t.clone() for n, t in callback.merger.merged.items()}, folder / "live_continued.safetensors")
    save_clip(folder)
    clip = with_tokenizer(Path(shutil.copytree(folder / "clip", folder.parent / "clip")))
    module, merge = stream_parts(clip, folder / "clip_experts")
    run = trainer(merge, 1)
    run.fit(module, few_images(TASKS, PROBE))
    run.save_checkpoint(folder / "stream.ckpt")
    module, merge = stream_parts(clip, folder / "clip_experts")
    trainer(merge, 2).fit(module, few_images(TASKS, PROBE), ckpt_path=folder / "stream.ckpt")
    known["stream"] = {"merged": merge.merger.fingerprint(), "scores": module.last_scores}
    save_file({n: t.clone() for n, t in merge.merger.merged.items()}, folder / "stream_continued.safetensors")
    shutil.rmtree(clip)
    there = Path.cwd()
    work = folder.parent / "work"
    work.mkdir()
    os.chdir(work)
    experts(Path("experts"))
    small_study("study").run()
    os.chdir(there)
    shutil.copytree(work / "study" / "cells", folder / "cells")
    shutil.rmtree(work)
    (folder / "known.json").write_text(json.dumps(known, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
