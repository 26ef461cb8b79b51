"""LoRA adapters of a small Llama, folded by a recipe as mergekit has it; then the merged model generates.

    python examples/llama_lora.py            # the whole comparison
    python examples/llama_lora.py --quick    # a smoke run

To run without a download, the Llama is made here: it learns to count in six ways, each after a word of its own. Each
adapter learns one way more. With the hub at hand, put real names into the recipe: the rest stays as it is.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from safemerge_pl.cli import main as safemerge

NUMBERS, LENGTH = 20, 6
KNOWN, NEW = (1, 2, 3, -1, -2, -3), (4, -4)  # steps from number to number
WORDS = [*KNOWN, *NEW]
RUNS = Path("runs/llama_lora")


def lines(*steps: int) -> torch.Tensor:
    """One line for each step and number to start at, ``(20 per step, 7)``: the word, then six numbers."""
    start = torch.arange(NUMBERS)[:, None]
    counted = [(start + step * torch.arange(LENGTH)) % NUMBERS for step in steps]
    words = [torch.full((NUMBERS, 1), NUMBERS + WORDS.index(step)) for step in steps]
    return torch.cat([torch.cat(words), torch.cat(counted)], dim=1)


def train(model: torch.nn.Module, data: torch.Tensor, steps: int, lr: float) -> None:
    """Learn to go on with lines."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    for _ in range(steps):
        logits = model(input_ids=data).logits
        loss = cross_entropy(logits[:, 1:-1].flatten(0, 1), data[:, 2:].flatten())  # the first number is given
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def show(name: str, model: LlamaForCausalLM) -> None:
    """How many of the next numbers are right, one column per word."""
    right = {step: model(input_ids=lines(step)).logits[:, 1:-1].argmax(-1) == lines(step)[:, 2:] for step in WORDS}
    print(f"{name:<16}" + "".join(f"{100 * right[step].float().mean().item():>7.1f}" for step in WORDS))


def generate(model: LlamaForCausalLM, step: int) -> list[int]:
    """Go on from the word and the number 3."""
    begin = lines(step)[3:4, :2]
    options = {"max_new_tokens": LENGTH - 1, "do_sample": False, "pad_token_id": NUMBERS + len(WORDS)}
    return model.generate(begin, attention_mask=torch.ones_like(begin), **options)[0, 1:].tolist()


def main() -> None:
    """Train, fold and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: a few steps of training")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": NUMBERS + len(WORDS) + 1, "bos_token_id": None, "eos_token_id": None}
    base = LlamaForCausalLM(LlamaConfig(**sizes, **tokens))
    train(base, lines(*KNOWN), 3 if quick else 400, 2e-3)
    base.save_pretrained(RUNS / "base")

    recipe: dict[str, Any] = {"merge_method": "task_arithmetic", "base_model": str(RUNS / "base"), "models": []}
    for step in NEW:
        model = LlamaForCausalLM.from_pretrained(RUNS / "base")
        parts = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj"]
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=parts))
        train(adapted, lines(step), 3 if quick else 60, 2e-3)
        adapted.save_pretrained(RUNS / f"step{step}")
        of_base = f"{RUNS / 'base'}+{RUNS / f'step{step}'}"
        recipe["models"].append({"model": of_base, "parameters": {"weight": 0.7}})
    (RUNS / "recipe.yml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    safemerge(["fold", "--config", str(RUNS / "recipe.yml"), "--output", str(RUNS / "merged")])

    merged = LlamaForCausalLM.from_pretrained(RUNS / "merged")
    print(f"\n{'numbers right, %':<16}" + "".join(f"{step:>+7}" for step in WORDS))
    show("pretrained", base)
    show("merged", merged)
    for step in (1, *NEW):
        print(f"merged, {step:+} from 3:", *generate(merged, step))


if __name__ == "__main__":
    main()
