"""What tests of the fit of two models share: a tower of another size, and what a fold says of a model."""

from typing import Any

import pytest
import tiny
import torch
from tiny import Add, Tensors

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.merger import ContinualMerger

POSITIONS = "embeddings.position_embedding.weight"


def tower_at(image_size: int, seed: int = 0) -> Tensors:
    """One tower, and fine-tunes of it by seed, with the position table that an image size takes."""
    tensors = tiny.copied(tiny.hf_vision().state_dict())
    tensors = tiny.tuned(tensors, seed) if seed else tensors
    rows = (image_size // 4) ** 2 + 1
    return tensors | {POSITIONS: tiny.randn(rows, 8), "embeddings.position_ids": torch.arange(rows)[None]}


def refusal(merger: ContinualMerger, incoming: Any) -> str:
    before = merger.fingerprint()
    with pytest.raises(CheckpointError) as caught:
        merger.fold(incoming, "task1")
    assert merger.fingerprint() == before
    return str(caught.value)


def notes(base: Any, incoming: Any, **settings: Any) -> tuple[str, ...]:
    return ContinualMerger(base, Add(), **settings).fold(incoming, "task1").notes
