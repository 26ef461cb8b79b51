"""How a matrix lies and where it is cut is told by its siblings, never by its name alone."""

import re
from typing import Any

import pytest
import tiny
import torch
from tiny import Add, Tensors
from tiny_families import hf, in_memory
from torch.nn import functional as F

from safemerge_pl.architectures.layers import select_layers
from safemerge_pl.checkpoints import CheckpointError, open_checkpoint
from safemerge_pl.checkpoints.layouts import convert_layout, pieces_of
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import WUDIMerging

Shapes = dict[str, tuple[int, ...]]

WIDTH = 8
QKV, PROJ = "transformer.h.0.attn.qkv.weight", "transformer.h.0.attn.proj.weight"


def heights(shapes: Shapes, **options: Any) -> list[int]:
    return [layer.shape[0] for layer in select_layers(shapes, **options) if layer.parameter == next(iter(shapes))]


# where a fused matrix is cut


@pytest.mark.parametrize(
    ("fused", "out"),
    [
        ("transformer.h.0.attn.qkv.weight", "transformer.h.0.attn.proj.weight"),  # LitGPT
        ("layers.0.attn.Wqkv.weight", "layers.0.attn.Wo.weight"),  # ModernBERT
        ("transformer.blocks.0.attn.Wqkv.weight", "transformer.blocks.0.attn.out_proj.weight"),  # MPT
        ("blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight"),  # timm
        ("model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.o_proj.weight"),  # Phi-3
    ],
)
@pytest.mark.parametrize(
    ("rows", "columns", "inner", "expected"),
    [
        (24, 8, 8, [8, 8, 8]),
        (12, 8, 8, [8, 2, 2]),  # thirds would be whole numbers too
        (16, 8, 8, [8, 4, 4]),
        (48, 8, 16, [16, 16, 16]),  # heads that are wider together than the model
        (24, 8, 16, [16, 4, 4]),  # rows are three times the width, and no thirds
        (12, 8, 4, [4, 4, 4]),
    ],
)
def test_queries_have_as_many_rows_as_the_output_projection_has_columns(
    fused: str, out: str, rows: int, columns: int, inner: int, expected: list[int]
) -> None:
    assert heights({fused: (rows, columns), out: (columns, inner)}) == expected


@pytest.mark.parametrize(
    "shapes",
    [
        {QKV: (12, 8)},  # thirds, or shared keys: nothing tells
        {QKV: (20, 8), PROJ: (8, 8)},  # 8 and twice 6
        {QKV: (13, 8), PROJ: (8, 8)},
        {QKV: (8, 8), PROJ: (8, 8)},
        {QKV: (40, 8), PROJ: (8, 8)},  # more keys than queries
        {"model.layers.0.self_attn.qkv_proj.weight": (9, 8)},
    ],
)
def test_a_fused_matrix_that_cannot_be_cut_is_refused_by_name_or_taken_whole(shapes: Shapes) -> None:
    name = next(iter(shapes))
    with pytest.raises(ValueError, match=rf"`{re.escape(name)}` of shape .*`layers`"):
        select_layers(shapes)
    assert heights(shapes, patterns=[name]) == [shapes[name][0]]
    assert heights(shapes, scope="linear") == [shapes[name][0]]


def test_thirds_need_no_witness_where_heads_are_never_shared() -> None:
    assert heights({"visual.transformer.resblocks.0.attn.in_proj_weight": (6, 1)}) == [2, 2, 2]
    assert heights({"blocks.0.attn.qkv.weight": (24, 8)}) == [8, 8, 8]


def test_a_matrix_whose_heads_stand_in_an_unknown_order_is_refused() -> None:
    """LitGPT's earlier name: the queries of a group, its key, its value, then the next group."""
    shapes = {"transformer.h.0.attn.attn.weight": (24, 8), PROJ: (8, 8)}
    with pytest.raises(ValueError, match=r"attn\.attn\.weight` holds q, k and v in an order"):
        select_layers(shapes)


def test_a_bias_is_cut_where_its_matrix_is() -> None:
    shapes = {"blocks.0.attn.qkv.weight": (12, 8), "blocks.0.attn.proj.weight": (8, 8), "blocks.0.attn.qkv.bias": (12,)}
    assert [piece.rows for piece in pieces_of("blocks.0.attn.qkv.bias", shapes)] == [(0, 8), (8, 10), (10, 12)]


def grouped() -> tuple[Tensors, Tensors]:
    """One model with shared key heads, under Llama's names and under LitGPT's."""
    split = {
        f"model.layers.0.self_attn.{part}_proj.weight": tiny.randn(rows, 8, seed=seed)
        for seed, (part, rows) in enumerate((("q", 8), ("k", 2), ("v", 2), ("o", 8)))
    }
    q, k, v, o = split.values()
    return split, {QKV: torch.cat([q, k, v]), PROJ: o}


def test_shared_heads_cross_layouts() -> None:
    split, fused = grouped()
    for base, incoming in ((split, fused), (fused, split)):
        found = convert_layout(open_checkpoint(base), list(base), open_checkpoint(incoming))
        assert found is not None
        tiny.assert_same(dict(found), base)


# how a matrix lies


def test_gpt2_narrows_as_its_own_forward_pass_does() -> None:
    """The output side of the feed-forward, merged where every linear layer is."""
    model: Any = tiny.hf_gpt2()
    layers = {layer.name: layer for layer in select_layers(in_memory(model), scope="linear")}
    for part, module in (("down", model.transformer.h[0].mlp.c_proj), ("out", model.transformer.h[0].attn.c_proj)):
        x = tiny.randn(3, module.weight.shape[0])
        upright = layers[f"model.0.{part}"].view(module.weight)
        torch.testing.assert_close(F.linear(x, upright), module(x) - module.bias)


GPT2: Shapes = {
    "transformer.h.0.attn.c_proj.weight": (8, 8),
    "transformer.h.0.attn.c_attn.weight": (8, 24),
    "transformer.h.0.mlp.c_fc.weight": (8, 32),
    "transformer.h.0.mlp.c_proj.weight": (32, 8),
}
SQUARE = next(iter(GPT2))


@pytest.mark.parametrize("witness", list(GPT2)[1:])
@pytest.mark.parametrize("block", ["0", "1"])
@pytest.mark.parametrize("turned", [True, False])
def test_a_square_matrix_lies_as_its_siblings_do(witness: str, block: str, turned: bool) -> None:
    """Those of its block, or of any other where its own says nothing."""
    shape = GPT2[witness] if turned else GPT2[witness][::-1]
    shapes = {SQUARE: (8, 8), witness.replace(".0.", f".{block}."): shape}
    (layer,) = select_layers(shapes, [SQUARE])
    assert layer.transposed == turned
    assert layer.name == "model.0.out"


def test_a_square_matrix_without_siblings_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"`{re.escape(SQUARE)}` of shape \(8, 8\) is square"):
        select_layers({SQUARE: (8, 8)}, [SQUARE])


def test_siblings_that_contradict_each_other_tell_nothing() -> None:
    shapes = {SQUARE: (8, 8), "transformer.h.0.attn.c_attn.weight": (24, 8), "transformer.h.0.mlp.c_fc.weight": (8, 32)}
    with pytest.raises(ValueError, match="is square"):
        select_layers(shapes, [SQUARE])


def test_starcoder_lies_upright_under_gpt2_s_names() -> None:
    model: Any = hf("GPTBigCodeModel", n_embd=8, n_layer=1, n_head=2, n_inner=32, vocab_size=32)()
    layers = {layer.name: layer for layer in select_layers(in_memory(model), ["*.c_proj.weight", "*.c_fc.weight"])}
    module = model.h[0].attn.c_proj
    x = tiny.randn(3, 8)
    torch.testing.assert_close(F.linear(x, layers["model.0.out"].view(module.weight)), module(x) - module.bias)
    assert not any(layer.transposed for layer in layers.values())


def nano(seed: int = 0) -> Tensors:
    """GPT-2's names, upright, as nanoGPT trains them."""
    return {
        name: tiny.randn(*shape[::-1], seed=seed + place)
        for place, (name, shape) in enumerate((GPT2 | {SQUARE: (8, 8)}).items())
    }


def gpt2(tensors: Tensors) -> Tensors:
    return {name: tensor.T.contiguous() for name, tensor in tensors.items()}


@pytest.mark.parametrize("method", [tiny.fast_method, WUDIMerging])
def test_an_upright_model_merges_as_one_without_a_family(method: Any) -> None:
    base, expert = nano(), tiny.tuned(nano(), 1)

    def renamed(tensors: Tensors) -> Tensors:
        return {f"part.{place}.weight": tensor for place, tensor in enumerate(tensors.values())}

    mine, right = ContinualMerger(base, method(), layers=["*"]), ContinualMerger(renamed(base), method(), layers=["*"])
    mine.fold(expert, "task")
    right.fold(renamed(expert), "task")
    if method is WUDIMerging:  # recovery of the other is seeded by names
        tiny.assert_same(renamed(mine.merged), right.merged)
    shapes = {layer.parameter: layer.shape for layer in mine.layers}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in base.items()}


@pytest.mark.parametrize("upright_base", [True, False])
def test_the_other_way_to_lie_is_turned_or_refused(upright_base: bool) -> None:
    """A fine-tune by nanoGPT on GPT-2 or the reverse: a square matrix fits by its shape, and is another matrix."""
    base, expert = nano(), tiny.tuned(nano(), 1)
    own, other = (base, gpt2(expert)) if upright_base else (gpt2(base), expert)
    merger = ContinualMerger(own, Add(), layers=["*.attn.c_proj.weight"])
    try:
        merger.fold(other, "task")
    except CheckpointError as refusal:
        assert "c_" in str(refusal)  # noqa: PT017 - either is right
        return
    expected = expert[SQUARE] if upright_base else expert[SQUARE].T
    torch.testing.assert_close(merger.merged[SQUARE], expected, rtol=0, atol=1e-6)
