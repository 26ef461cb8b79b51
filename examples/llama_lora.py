"""LoRA adapters of a small Llama, folded by a recipe as mergekit has it; then the merged model generates.

    python examples/llama_lora.py            # the whole comparison
    python examples/llama_lora.py --quick    # a smoke run

To run without a download, the Llama is made here: it learns to count up. One adapter learns to count in steps of two,
another to count down, each after a word of its own. With the hub at hand, put real names into the recipe: all that
comes after it stays as it is.
"""

import argparse
from pathlib import Path

import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from safemerge_pl.cli import main as safemerge

NUMBERS, LENGTH = 20, 6
TASKS = {"up": 1, "twos": 2, "down": -1}  # the word that a line begins with, and the step from number to number
RUNS = Path("runs/llama_lora")


def lines(task: str) -> torch.Tensor:
    """One line for each number to start at, ``(20, 7)``: the word, then six numbers."""
    word, step = list(TASKS).index(task) + NUMBERS, TASKS[task]
    counted = (torch.arange(NUMBERS)[:, None] + step * torch.arange(LENGTH)) % NUMBERS
    return torch.cat([torch.full((NUMBERS, 1), word), counted], dim=1)


def train(model: torch.nn.Module, task: str, steps: int, lr: float) -> None:
    """Learn one task."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    data = lines(task)
    for _ in range(steps):
        logits = model(input_ids=data).logits
        loss = cross_entropy(logits[:, 1:-1].flatten(0, 1), data[:, 2:].flatten())  # the first number is given
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def complete(model: LlamaForCausalLM, task: str) -> torch.Tensor:
    """Lines that the model goes on with by itself, after the word and the first number, ``(20, 7)``."""
    return model.generate(lines(task)[:, :2], max_new_tokens=LENGTH - 1, do_sample=False, pad_token_id=0)


def show(name: str, model: LlamaForCausalLM) -> None:
    """The share of numbers that are right, a column a task."""
    cells = [100 * (complete(model, task) == lines(task))[:, 2:].float().mean().item() for task in TASKS]
    print(f"{name:<24}" + "".join(f"{cell:>10.1f}" for cell in cells))


def main() -> None:
    """Train, fold and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: a few steps a task")
    steps = 5 if parser.parse_args().quick else 200
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=NUMBERS + len(TASKS),
        bos_token_id=None,
        eos_token_id=None,
    )
    base = LlamaForCausalLM(config)
    train(base, "up", steps, 1e-3)
    base.save_pretrained(RUNS / "base")

    for task in ("twos", "down"):
        model = LlamaForCausalLM.from_pretrained(RUNS / "base")
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"])
        adapted = get_peft_model(model, lora)
        train(adapted, task, steps, 5e-3)
        adapted.save_pretrained(RUNS / task)

    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(RUNS / "base"),
        "models": [
            {"model": f"{RUNS / 'base'}+{RUNS / task}", "parameters": {"weight": 0.8}} for task in ("twos", "down")
        ],
    }
    (RUNS / "recipe.yml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    for output, options in {"merged": [], "safe": ["--method", "SafeMerge", "--method.scoring_rank", "11"]}.items():
        safemerge(["fold", "--config", str(RUNS / "recipe.yml"), "--output", str(RUNS / output), *options])

    print(f"\n{'numbers right, in %':<24}" + "".join(f"{task:>10}" for task in TASKS))
    show("pretrained", base)
    show("Task Arithmetic", LlamaForCausalLM.from_pretrained(RUNS / "merged"))
    merged = LlamaForCausalLM.from_pretrained(RUNS / "safe")
    show("SAFE-Merge", merged)
    for task in TASKS:
        print(f"SAFE-Merge, {task} from 3:", *complete(merged, task)[3, 1:].tolist())


if __name__ == "__main__":
    main()
