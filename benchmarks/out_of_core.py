"""Fold a sharded bfloat16 model with the shapes of a 3 B Llama from disk to disk, and watch the process's memory."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from safemerge_pl.output.weights import TensorSpec, write_weights
from safemerge_pl.runtime.files import write_figure

__all__ = ["out_of_core"]

_HIDDEN, _KV, _FEED, _VOCABULARY = 3072, 1024, 8192, 128256


def specs(layers: int) -> dict[str, TensorSpec]:
    """Shapes of Llama-3.2-3B with so many layers."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", _HIDDEN), ("k_proj", _KV), ("v_proj", _KV), ("o_proj", _HIDDEN)):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (rows, _HIDDEN)
        shapes |= {f"{prefix}.mlp.{name}.weight": (_FEED, _HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (_HIDDEN, _FEED)
        shapes |= {f"{prefix}.{name}.weight": (_HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {name: TensorSpec(shape, torch.bfloat16) for name, shape in shapes.items()}


def make(folder: Path, layers: int, seed: int) -> None:
    """A model folder of random weights, written shard by shard; seeds above 0 are fine-tunes of seed 0."""
    folder.mkdir(parents=True)
    wanted = specs(layers)
    places = {name: index for index, name in enumerate(wanted)}

    def read(name: str) -> torch.Tensor:
        shape = wanted[name].shape
        base = 0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(places[name]))
        if seed:
            noise = torch.randn(*shape, generator=torch.Generator().manual_seed(10**6 * seed + places[name]))
            base += 0.002 * noise
        return base

    write_weights(folder, "model", wanted, read, "2GB")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))


def out_of_core(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """A row a size: seconds and the largest resident memory of ``safemerge fold``."""
    rows: list[dict[str, object]] = []
    for layers in arguments.llama_layers:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as place:
            base, expert, output = (str(Path(place) / name) for name in ("base", "expert", "out"))
            make(Path(base), layers, 0)
            make(Path(expert), layers, 1)
            command = [sys.executable, "-m", "benchmarks.out_of_core", "--pretrained", base, "--incoming", expert]
            command += ["--output", output, "--low_memory", "true", *arguments.fold_options]
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            seconds = time.perf_counter() - start
            if done.returncode:
                raise SystemExit(f"the fold failed:\n{done.stderr[-2000:]}")
            peak = float(done.stdout.strip().splitlines()[-1])
            size = sum(file.stat().st_size for file in Path(base).iterdir()) / 2**30
            row = {"layers": layers, "model_gib": size, "seconds": seconds, "peak_rss_gib": peak / 2**10}
            print(row, flush=True)
            rows.append(row)
    if len(rows) > 1:
        write_figure(arguments.output.with_name("out_of_core.png"), growth(rows))
    return rows


def growth(rows: list[dict[str, object]]) -> Any:
    """Seconds and memory over the number of layers."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    layers = [row["layers"] for row in rows]
    left, right = figure.subplots(1, 2)
    left.plot(layers, [row["seconds"] for row in rows], marker="o")
    left.set(xlabel="layers", ylabel="seconds", title="Time of a fold", ylim=0)
    right.plot(layers, [row["peak_rss_gib"] for row in rows], marker="o", label="peak of the process")
    right.plot(layers, [row["model_gib"] for row in rows], marker="s", linestyle="--", label="one model on disk")
    right.set(xlabel="layers", ylabel="GiB", title="Memory", ylim=0)
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    from safemerge_pl.cli import main
    from safemerge_pl.runtime.memory import peak_memory_mib

    main(["fold", *sys.argv[1:]])
    print(peak_memory_mib())
