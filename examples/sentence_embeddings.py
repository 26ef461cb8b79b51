"""Two fine-tunes of a sentence-transformers model, folded into one that ``SentenceTransformer`` loads.

    python examples/sentence_embeddings.py            # the whole comparison
    python examples/sentence_embeddings.py --quick    # a smoke run

To run without a download, a small BERT with the zoo's tokenizer plays the pretrained model; with the hub at hand,
``SentenceTransformer("owner/name")`` takes its place. It learns to find a thing by its name, and each fine-tune learns
to find things of one kind by a sentence about them.
"""

import argparse
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, BertConfig, BertModel

import safemerge_pl as sm
from safemerge_pl.zoo import Zoo

RUNS = Path("runs/sentence_embeddings")
Pairs = list[tuple[str, str]]


def pairs(name: str, question: str, answer: str) -> Pairs:
    """A question and an answer about each class of one of the zoo's sets."""
    return [(question.format(each), answer.format(each)) for each in Zoo().describe(name)["classes"]]


TASKS = {
    "names": pairs("probe1_seen_styles", "{}", "a drawing of {}"),
    "flags": pairs("flags", "where is {}?", "the country {} has this flag"),
    "fashion": pairs("fashion", "what do I wear? {}", "clothes in the shop: {}"),
}


def pretrained() -> SentenceTransformer:
    """A small model of one's own, with mean pooling."""
    tokenizer = AutoTokenizer.from_pretrained(Zoo().model)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=64)).save_pretrained(RUNS / "bert")
    tokenizer.save_pretrained(RUNS / "bert")
    return SentenceTransformer(modules=[Transformer(str(RUNS / "bert"), max_seq_length=32), Pooling(64)], device="cpu")


def similarities(model: SentenceTransformer, questions: list[str], answers: list[str]) -> torch.Tensor:
    """Cosines of each question with each answer."""
    first, second = (model(model.preprocess(texts))["sentence_embedding"] for texts in (questions, answers))
    return torch.nn.functional.normalize(first) @ torch.nn.functional.normalize(second).T


def train(model: SentenceTransformer, data: Pairs, steps: int, lr: float) -> SentenceTransformer:
    """Learn to find the answer to each question among those of a batch."""
    optimizer, shuffled = torch.optim.AdamW(model.parameters(), lr=lr), torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = [data[place] for place in torch.randperm(len(data), generator=shuffled)[:32].tolist()]
        loss = cross_entropy(20 * similarities(model, *map(list, zip(*batch, strict=True))), torch.arange(len(batch)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def show(name: str, model: SentenceTransformer) -> None:
    """How many answers are found, one column per task."""
    cells = []
    for data in TASKS.values():
        found = similarities(model, *map(list, zip(*data, strict=True))).argmax(1)
        cells.append(100 * (found == torch.arange(len(data))).float().mean().item())
    print(f"{name:<16}" + "".join(f"{cell:>10.1f}" for cell in cells))


def main() -> None:
    """Train, fold and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: a few steps of training")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    train(pretrained(), TASKS["names"], 3 if quick else 60, 1e-3).save(str(RUNS / "base"))
    method = sm.SafeMerge(scoring_rank=11, recovery_rank=6, task_rank=2)  # the paper's ranks, for a width of 64
    merger = sm.ContinualMerger(RUNS / "base", method=method)
    print(f"{'found, in %':<16}" + "".join(f"{task:>10}" for task in TASKS))
    show("pretrained", SentenceTransformer(str(RUNS / "base"), device="cpu"))
    for task in ("flags", "fashion"):
        model = SentenceTransformer(str(RUNS / "base"), device="cpu")
        train(model, TASKS[task], 3 if quick else 20, 3e-4).save(str(RUNS / task))
        show(f"tuned on {task}", model)
        merger.fold(RUNS / task, task)
    merger.save(RUNS / "merged")
    show("merged", SentenceTransformer(str(RUNS / "merged"), device="cpu"))


if __name__ == "__main__":
    main()
