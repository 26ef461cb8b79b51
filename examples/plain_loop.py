"""Merging in a plain PyTorch loop: ``restart()`` before a task, ``fold_trained(task)`` after it.

python examples/plain_loop.py            # the whole comparison
python examples/plain_loop.py --quick    # a smoke run
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset
from zoo_halves import classes, halves, length, show

import safemerge_pl as sm
from safemerge_pl.backbones import CLIPBackbone
from safemerge_pl.backbones.heads import zero_shot_head

TASKS = ["letters", "fashion", "weather"]


def train(clip: nn.Module, head: torch.Tensor, data: TensorDataset, epochs: int) -> None:
    """Fine-tune the vision tower on one task."""
    optimizer = torch.optim.AdamW(clip.vision_model.parameters(), lr=3e-4)  # fresh for every task
    for _ in range(epochs):
        for pixels, labels in DataLoader(data, batch_size=32, shuffle=True):
            loss = cross_entropy(100 * normalize(clip(pixels), dim=-1) @ head.T, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(clip: nn.Module, head: torch.Tensor, data: TensorDataset) -> float:
    """Share of the images that get their own class."""
    right = [(clip(x) @ head.T).argmax(1) == y for x, y in DataLoader(data, batch_size=256)]
    return torch.cat(right).float().mean().item()


def run(sets: dict[str, tuple[TensorDataset, TensorDataset]], epochs: int, merge: bool) -> list[dict[str, float]]:
    """Train through all tasks; accuracies after each."""
    torch.manual_seed(0)
    clip = CLIPBackbone("zoo")
    clip.load()
    heads = {task: zero_shot_head(clip, classes(task), ["a picture of a {}."]) for task in TASKS}
    method = sm.SafeMerge(scoring_rank=21, recovery_rank=11, task_rank=2)  # the paper's ranks, scaled to a width of 128
    merger = sm.LiveMerger(clip.vision_model, method)
    rows = []
    for task, (training, _) in sets.items():
        if merge:
            merger.restart()  # the pretrained weights, for every task
        train(clip, heads[task], training, epochs)
        if merge:
            merger.fold_trained(task)  # the merged weights are in the module now
        rows.append({name: accuracy(clip, heads[name], test) for name, (_, test) in sets.items()})
    if merge:
        merger.save("runs/plain_loop")  # continue tomorrow with LiveMerger.load("runs/plain_loop", module)
    return rows


def main() -> None:
    """Compare."""
    epochs, limit = length(__doc__)
    sets = {task: halves(task, limit) for task in TASKS}
    show("Sequential fine-tuning", run(sets, epochs, merge=False))
    show("The same loop with LiveMerger", run(sets, epochs, merge=True))


if __name__ == "__main__":
    main()
