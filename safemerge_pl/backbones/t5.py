"""T5 as a backbone: the whole text-to-text model is the one that is merged, and it is scored by what it writes."""

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from safemerge_pl.backbones.base import (
    Backbone,
    backbone_spec,
    load_tokenizer,
    model_folder,
    quiet_transformers,
    refuse_foreign_code,
)
from safemerge_pl.backbones.noise import noise_tokens
from safemerge_pl.checkpoints.open import CheckpointError, open_checkpoint

__all__ = ["T5Backbone"]


class T5Backbone(Backbone):
    """``T5ForConditionalGeneration`` of transformers with its tokenizer, decoding greedily.

    Answers do not depend on the ``generation_config.json`` of the model: always greedy, ``max_length`` tokens at most.

    Args:
        pretrained: folder or hub id of a T5 model.
        revision: branch, tag or commit, for a hub id.
        max_input_length: tokens of a prompt; what is longer is cut.
        max_length: tokens of an answer, its start token included.

    Example:
        >>> T5Backbone().spec()["init_args"]["pretrained"]
        'google/flan-t5-base'
    """

    merged_attr = "model"

    def __init__(
        self,
        pretrained: str = "google/flan-t5-base",
        revision: str | None = None,
        max_input_length: int = 512,
        max_length: int = 10,
    ) -> None:
        super().__init__()
        self.pretrained, self.revision = str(pretrained), revision
        self.max_input_length, self.max_length = max_input_length, max_length
        self._tokenizer: Any = None

    def spec(self) -> dict[str, Any]:
        """See :class:`Backbone`."""
        names = ("pretrained", "revision", "max_input_length", "max_length")
        return backbone_spec(self, **{name: getattr(self, name) for name in names})

    def folder(self) -> Path:
        """See :class:`Backbone`."""
        return model_folder(self.pretrained, self.revision, "T5")

    def load(self) -> None:
        """See :class:`Backbone`.

        Raises:
            CheckpointError: if the folder is no whole T5 model with its tokenizer. A model whose configuration says
                that it has its own output head must hold one: transformers would tie it to the embedding in silence.
        """
        if hasattr(self, "model"):
            return
        from transformers import GenerationConfig, T5ForConditionalGeneration

        folder = self.folder()
        own_head = _own_head(folder)
        refuse_foreign_code(folder)
        if own_head and "lm_head.weight" not in open_checkpoint(folder):
            raise CheckpointError(
                f"{folder} lacks `lm_head.weight`, but its config.json says that the head is not tied."
            )
        with quiet_transformers():
            try:
                model, info = T5ForConditionalGeneration.from_pretrained(
                    folder, dtype=torch.float32, output_loading_info=True
                )
                self._tokenizer = load_tokenizer(folder)
            except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
                raise CheckpointError(f"{folder} is no T5 model that transformers can load: {error}") from error
        missing = sorted(info["missing_keys"])
        if missing:
            raise CheckpointError(f"{folder} lacks {len(missing)} tensors of a T5 model, first `{missing[0]}`.")
        config = model.config
        model.generation_config = GenerationConfig(
            decoder_start_token_id=config.decoder_start_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
        self.model = model
        self.eval()

    def preprocess(self, examples: Sequence[str]) -> dict[str, Tensor]:
        """``input_ids`` and ``attention_mask`` of prompts, ``(N, longest)``."""
        tokens = self._tokenizer(
            list(examples), padding=True, truncation=True, max_length=self.max_input_length, return_tensors="pt"
        )
        return {name: tokens[name] for name in ("input_ids", "attention_mask")}

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Generated tokens ``(N, max_length)`` at most, greedy.

        Raises:
            MisconfigurationException: in float16, in which T5's activations overflow.
            FloatingPointError: if a logit is NaN or Inf.
        """
        weight = self.model.shared.weight
        kind = weight.device.type
        half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        if half or weight.dtype == torch.float16:
            raise MisconfigurationException("T5 overflows in float16; use precision '32-true' or 'bf16-mixed'.")
        length = self.max_length  # an argument: from the configuration transformers 5.0 takes it for new tokens alone
        found = self.model.generate(**inputs, max_length=length, return_dict_in_generate=True, output_logits=True)
        if not torch.isfinite(torch.stack(found.logits)).all():
            raise FloatingPointError("the logits hold NaN or Inf: a weight is broken.")
        tokens: Tensor = found.sequences
        return tokens

    def noise(self, count: int) -> dict[str, Tensor]:
        """See :class:`Backbone`; words at random, none of them with a meaning of its own to the model."""
        special = set(self._tokenizer.all_special_ids)
        words = [token for token in range(len(self._tokenizer)) if token not in special]
        tokens = noise_tokens(count, words)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of the first token of an answer, ``(N, vocabulary)``."""
        tokens = inputs["input_ids"]
        start = torch.full_like(tokens[:, :1], self.model.config.decoder_start_token_id)
        logits: Tensor = self.model(**inputs, decoder_input_ids=start).logits[:, 0]
        return logits

    def decode(self, tokens: Tensor | Sequence[Sequence[int]]) -> list[str]:
        """Texts of tokens ``(N, length)``, without the special ones."""
        plain = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        texts: list[str] = self._tokenizer.batch_decode(plain, skip_special_tokens=True)
        return texts

    def generate(self, prompts: Sequence[str]) -> list[str]:
        """Answers to prompts."""
        tokens = self.preprocess(prompts)
        with torch.inference_mode():
            return self.decode(self({name: part.to(self.model.device) for name, part in tokens.items()}))

    def written(self, answers: Sequence[str]) -> list[str]:
        """Answers as :meth:`decode` gives them back, which is what a generated one is compared with."""
        return self.decode([self._tokenizer(answer)["input_ids"] for answer in answers])


def _own_head(folder: Path) -> bool:
    """Whether a model's configuration says that its output head is not the embedding."""
    try:
        settings = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder} has no readable config.json; give the folder of a whole T5 model.") from error
    if settings.get("model_type") != "t5":
        raise CheckpointError(f"{folder} is a model of type {settings.get('model_type')}, not t5.")
    return settings.get("tie_word_embeddings") is False
