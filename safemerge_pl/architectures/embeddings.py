"""Tables that a model looks rows up in, and the output heads that are often tied to one, by the names of tensors."""

import re

__all__ = ["is_embedding", "is_position_table", "is_tied_candidate", "is_vocabulary", "shared_names"]

_WORDS = re.compile(
    r"(?:^|\.)(?:shared|embed_tokens|embed_in|token_embedding|tok_embeddings|word_embeddings|wte)\.weight$"
)

_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.weight$")
"""Maps the last features to a score for each word: a linear layer, with a row per word."""

_PROJECTION = re.compile(
    r"(?:^|\.)(?:\w*embed(?:ding)?s?_proj(?:ect|ection|_layer)?|embedding_(?:hidden_mapping_in|transformation))\."
    r"(?:weight|bias)$"
)
"""Maps an embedding to the width of the blocks (ALBERT, ELECTRA, DeBERTa): a linear layer, in which nothing is looked
up. Being outside of the blocks it is merged by the methods of every linear layer and left pretrained by the others."""

_POSITIONS = re.compile(
    r"(?:^|\.)(?:(?:position(?:al)?_embeddings?|embed_positions|pos_embed(?:ding)?|wpe|rel_embeddings)(?:\.weight)?"
    r"|relative_attention_bias\.weight|relative_position_bias_table)$"
)

_SHARED_NAMES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""The names that one embedding has in an encoder-decoder such as T5 or BART."""

_SHARED = re.compile(r"(?:^|(?<=\.))(?:" + "|".join(map(re.escape, _SHARED_NAMES)) + r")$")


def is_embedding(name: str) -> bool:
    """Whether rows of a tensor are looked up, so that it is no linear layer: words, positions, token types.

    Example:
        >>> [is_embedding(name) for name in ("wte.weight", "token_type_embeddings.weight", "embed_out.weight")]
        [True, True, False]
        >>> is_embedding("encoder.embedding_hidden_mapping_in.weight"), is_embedding("embeddings_project.weight")
        (False, False)
    """
    if _HEAD.search(name) or _PROJECTION.search(name):
        return False
    return "embed" in name or is_position_table(name) or is_vocabulary(name)


def is_position_table(name: str) -> bool:
    """Whether a tensor has a row for each position or distance, so that its height follows image size or length.

    Example:
        >>> [is_position_table(name) for name in ("visual.positional_embedding", "h.wpe.weight", "h.wte.weight")]
        [True, True, False]
    """
    return _POSITIONS.search(name) is not None


def is_vocabulary(name: str) -> bool:
    """Whether a tensor has a row for each word: an embedding of words, or an output head.

    Example:
        >>> [is_vocabulary(name) for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")]
        [True, True, False]
    """
    return bool(_WORDS.search(name) or _HEAD.search(name))


def is_tied_candidate(name: str) -> bool:
    """Whether a tensor may be one and the same as another, so that a file may hold it under the other's name only.

    Many families tie the output head to the embedding of words.

    Example:
        >>> is_tied_candidate("lm_head.weight"), is_tied_candidate("model.layers.0.self_attn.q_proj.weight")
        (True, False)
    """
    return is_vocabulary(name)


def shared_names(name: str) -> list[str]:
    """All names of an embedding that encoder and decoder share, under the prefix of ``name``; none for other tensors.

    A file holds the embedding under one of them, whichever.

    Example:
        >>> shared_names("model.shared.weight")
        ['model.shared.weight', 'model.encoder.embed_tokens.weight', 'model.decoder.embed_tokens.weight']
    """
    match = _SHARED.search(name)
    return [name[: match.start()] + other for other in _SHARED_NAMES] if match else []
