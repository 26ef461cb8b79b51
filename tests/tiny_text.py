"""A small world in GLUE's form and a small T5 that really learns it: sets, tokenizer, models, training."""

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny import Tensors, randn, seeded
from torch import nn

from safemerge_pl.data.glue import GLUEData

ABOUT = json.loads((Path(__file__).parent.parent / "safemerge_pl" / "data" / "glue.json").read_text())["sets"]
GOOD = ["good", "great", "fine", "lovely", "kind", "warm", "sweet", "bright"]
BAD = ["bad", "awful", "poor", "dull", "cold", "rude", "bitter", "grim"]
NOUNS = ["film", "dog", "house", "road", "cake", "song", "bird", "train"]
VERBS = ["runs", "sings", "waits", "falls", "shines", "sleeps", "grows", "turns"]
Row = dict[str, Any]


def sst2(r: random.Random, words: slice) -> Row:
    """Sentiment is that of the adjective."""
    label = r.randrange(2)
    adjective = r.choice((BAD, GOOD)[label][words])
    return {"sentence": f"the {adjective} {r.choice(NOUNS)} {r.choice(VERBS)}", "label": label}


def cola(r: random.Random, words: slice) -> Row:
    """A sentence needs a verb."""
    label = r.randrange(2)
    last = r.choice((NOUNS, VERBS)[label][words])
    return {"sentence": f"the {r.choice(GOOD + BAD)} {r.choice(NOUNS)} {last}", "label": label}


def stsb(r: random.Random, words: slice) -> Row:
    """Similarity is that of the adjectives."""
    a, b = r.choice(GOOD + BAD), r.choice(GOOD + BAD)
    label = 5.0 if a == b else 3.75 if (a in GOOD) == (b in GOOD) else 1.25
    noun = r.choice(NOUNS)
    return {"sentence1": f"the {a} {noun}", "sentence2": f"the {b} {noun}", "label": label}


def pair(first: str, second: str, classes: int = 2) -> Callable[[random.Random, slice], Row]:
    """Whether (0) or not two sentences have the same noun; only used to fill sets of this form."""

    def make(r: random.Random, words: slice) -> Row:
        label, nouns, verb = r.randrange(classes), r.sample(NOUNS, 2), r.choice(VERBS)
        other = nouns[min(label, 1)]
        return {first: f"the {nouns[0]} {verb}", second: f"the {other} {verb}", "label": label}

    return make


MAKERS: dict[str, Callable[[random.Random, slice], Row]] = {
    "cola": cola,
    "sst2": sst2,
    "stsb": stsb,
    "mrpc": pair("sentence1", "sentence2"),
    "qqp": pair("question1", "question2"),
    "mnli": pair("premise", "hypothesis", 3),
    "qnli": pair("question", "sentence"),
    "rte": pair("sentence1", "sentence2"),
}
EVERY, KNOWN = slice(None), slice(0, 4)
"""All words, and the half of them whose meaning the pretrained model has learned."""


def examples(name: str, count: int, seed: int, words: slice = EVERY) -> list[Row]:
    r = random.Random(f"{name} {seed}")
    return [MAKERS[name](r, words) | {"idx": index} for index in range(count)]


def table(name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows with the columns, types and label names that the hub's GLUE has."""
    from datasets import ClassLabel, Dataset, Features, Value

    columns: dict[str, Any] = {key: Value("string") for key in rows[0] if key not in ("label", "idx")}
    labels = ABOUT[name]["labels"]
    columns |= {"label": ClassLabel(names=labels) if labels else Value("float32"), "idx": Value("int32")}
    return Dataset.from_list([dict(row) for row in rows], features=Features(columns))


def write_glue(folder: Path, rows: int, names: Sequence[str] = tuple(MAKERS), seed: int = 7) -> Path:
    """Validation splits in the hub's layout."""
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        shard = folder / name / f"{ABOUT[name]['split']}-00000-of-00001.parquet"
        table(name, examples(name, rows, seed)).to_parquet(shard)
    return folder


def tokenizer() -> Any:
    """A word a token; numbers with one decimal are words; ``</s>`` at the end, as T5 has it."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Split(Regex(r"\d\.\d|\w+|[^\w\s]"), "removed", invert=True)
    texts = [" ".join(["the", *GOOD, *BAD, *NOUNS, *VERBS]), *(f"{tenth / 10:.1f}" for tenth in range(51))]
    for about in ABOUT.values():
        fields = [field for _, field, _, _ in string.Formatter().parse(about["prompt"]) if field]
        texts += [about["prompt"].format(**dict.fromkeys(fields, "")), *about["answers"]]
    words = sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)})
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}, unk_token="<unk>")
    )
    inner.pre_tokenizer = split
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def t5(width: int = 32, *, own_head: bool = True, **settings: Any) -> nn.Module:
    """A gated T5 with random weights over the words of :func:`tokenizer`; its head untied as Flan-T5's."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = {"d_model": width, "d_kv": width // 4, "d_ff": 2 * width, "num_heads": 4, "num_layers": 2}
    config |= {"num_decoder_layers": 1, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
    config |= {"vocab_size": len(tokenizer()), "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    with seeded():
        model = T5ForConditionalGeneration(T5Config(**config, tie_word_embeddings=not own_head, **settings)).eval()
    if own_head:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def save_t5(model: nn.Module, folder: Path, *, own_head: bool = True) -> Path:
    """A folder as the hub has Flan-T5's: its configuration says by the old field that the head is not tied."""
    with seeded():
        model.save_pretrained(folder)  # type: ignore[operator]
        tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["scale_decoder_outputs"]
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": not own_head}))
    return folder


def noisy(model: nn.Module, seed: int, scale: float = 0.02) -> nn.Module:
    """A fine-tune that learned nothing: noise on every parameter."""
    import copy

    tuned = copy.deepcopy(model)
    with torch.no_grad():
        for index, parameter in enumerate(tuned.parameters()):
            parameter += scale * randn(*parameter.shape, seed=100 * seed + index)
    return tuned


def train(model: nn.Module, names: Sequence[str], steps: int, lr: float, seed: int, words: slice = EVERY) -> None:
    """Teach a T5 some sets with their prompts, in place; examples are drawn anew for each step."""
    words_to_tokens, rows = tokenizer(), random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    for _ in range(steps):
        prompts, answers = [], []
        for _ in range(32):
            name = rows.choice(names)
            row, about = MAKERS[name](rows, words), ABOUT[name]
            prompts.append(about["prompt"].format(**row))
            answers.append(about["answers"][row["label"]] if about["answers"] else f"{row['label']:.1f}")
        tokens = words_to_tokens(prompts, padding=True, return_tensors="pt")
        wanted = words_to_tokens(answers, padding=True, return_tensors="pt")["input_ids"]
        wanted[wanted == 0] = -100
        loss = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], labels=wanted).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def weights(model: nn.Module) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def glue(folder: Path, tasks: Sequence[str], controls: Sequence[str] = (), **settings: Any) -> GLUEData:
    return GLUEData(list(tasks), list(controls), folder=str(folder), **settings)
