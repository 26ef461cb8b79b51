"""The pieces of a tensor have one canonical name in every library."""

import pytest
import tiny
from torch import nn

from safemerge_pl.architectures.layers import vision_only
from safemerge_pl.architectures.pieces import pieces_of


def pieces(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every piece of a model's vision tower."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = [piece for name in vision_only(shapes) for piece in pieces_of(name, shapes)]
    assert len({piece.name for piece in found}) == len(found)
    return {piece.name: piece.shape for piece in found}


def test_a_clip_tower_has_the_same_pieces_in_transformers_and_open_clip() -> None:
    ours, theirs = pieces(tiny.hf_vision()), pieces(tiny.open_clip_model())
    assert ours == theirs
    assert len(ours) == 2 * 16 + 7


def test_every_tensor_of_a_tower_but_its_projection_has_pieces() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tiny.open_clip_model().state_dict().items()}
    assert [name for name in vision_only(shapes) if not pieces_of(name, shapes)] == ["visual.proj"]


@pytest.mark.parametrize(
    "fused",
    ["visual.resblocks.0.attn.in_proj_weight", "blocks.0.attn.qkv.bias", "blocks.0.attn.qkv.weight"],
)
def test_pieces_cover_every_row_once(fused: str) -> None:
    rows = [piece.rows for piece in pieces_of(fused, {fused: (12, 4) if fused.endswith("weight") else (12,)})]
    assert rows == [(0, 4), (4, 8), (8, 12)]


@pytest.mark.parametrize(
    ("name", "shape"), [("head.weight", (3, 8)), ("blocks.0.attn.qkv.weight", (13, 4)), ("logit_scale", ())]
)
def test_what_is_not_known_or_cannot_be_cut_has_no_pieces(name: str, shape: tuple[int, ...]) -> None:
    assert pieces_of(name, {name: shape}) == []
