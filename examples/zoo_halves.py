"""Data for the examples: the embedded zoo's images, half of each set to train on and half to test on.

The package ships test splits only, so an honest example has to divide them: even rows train, odd rows test. The
accuracies are therefore not comparable with those in the zoo's own README.
"""

import datasets
import torch
from pyarrow import parquet
from torch.utils.data import TensorDataset
from transformers import CLIPImageProcessor

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


def show(title: str, rows: list[dict[str, float]]) -> None:
    """The accuracy matrix: a row after each task, a column a task."""
    tasks = list(rows[-1])
    print(f"\n{title} (accuracy in %)\n" + " " * 22 + "".join(f"{task[:12]:>14}" for task in tasks) + f"{'mean':>10}")
    for task, row in zip(tasks, rows, strict=True):
        cells = "".join(f"{100 * row[name]:>14.1f}" for name in tasks)
        seen = [row[name] for name in tasks[: tasks.index(task) + 1]]
        print(f"after {task:<16}{cells}{100 * sum(seen) / len(seen):>10.1f}")
    print("(mean: over the tasks trained so far)")
