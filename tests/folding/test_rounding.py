"""A fine-tune in fewer bits than its base: what only was rounded did not change."""

from typing import Any

import pytest
import tiny
import torch
from tiny import Tensors
from torch import Tensor

from safemerge_pl.folding.rounding import unrounded
from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import OPCM, IsoC, MergeMethod, TaskArithmetic, TiesMerging, WUDIMerging

WIDTH = 16
Q, K, V = (slice(WIDTH * part, WIDTH * (part + 1)) for part in range(3))

FUSED: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "open_clip": ("visual.transformer.resblocks.0.attn.in_proj_weight", False, ("q", "k", "v")),
    "timm": ("blocks.0.attn.qkv.weight", False, ("q", "k", "v")),
    "Phi-3": ("model.layers.0.self_attn.qkv_proj.weight", False, ("q", "k", "v")),
    "GPT-2": ("h.0.attn.c_attn.weight", True, ("q", "k", "v")),
    "gate and up": ("model.layers.0.mlp.gate_up_proj.weight", False, ("gate", "up")),
}

METHODS: dict[str, MergeMethod] = {
    "safe_merge": tiny.fast_method(),
    "opcm": OPCM(),
    "ties": TiesMerging(),
    "task_arithmetic": TaskArithmetic(),
    "iso_c": IsoC(),
    "wudi": WUDIMerging(),
}


def merged(base: Tensors, incoming: Tensors, method: MergeMethod, **options: Any) -> ContinualMerger:
    merger = ContinualMerger(base, method, **options)
    merger.fold(incoming, "task")
    return merger


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", FUSED)
def test_a_part_that_nobody_trained_stays_as_it_was(layout: str, method: str, stored: torch.dtype) -> None:
    name, turned, parts = FUSED[layout]
    whole = tiny.randn(len(parts) * WIDTH, WIDTH, seed=3)
    new = whole.clone()
    new[Q] += 0.1 * tiny.randn(WIDTH, WIDTH, seed=4)
    base, incoming = ({name: tensor.T.contiguous() if turned else tensor} for tensor in (whole, new))
    merger = merged(base, {name: tensor.to(stored) for name, tensor in incoming.items()}, METHODS[method])
    found = merger.merged[name].T if turned else merger.merged[name]
    assert not torch.equal(found[Q], whole[Q])
    assert torch.equal(found[WIDTH:], whole[WIDTH:])
    if merger.layers:  # other methods take the tensor whole
        changed = [row.layer.rpartition(".")[2] for row in merger.reports[0].layers if row.task_norm]
        assert changed == [parts[0]]


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_entries_that_nobody_trained_have_no_part_in_the_task(stored: torch.dtype) -> None:
    """Rows of a vocabulary, heads, or a mask: the others are the pretrained ones, rounded."""
    base = {"model.embed_tokens.weight": tiny.randn(8, 4, seed=1), "layers.0.mlp.fc1.weight": tiny.randn(8, 4, seed=2)}
    incoming = {name: tensor.clone() for name, tensor in base.items()}
    for tensor in incoming.values():
        tensor[2] += 1
    found = merged(base, {name: tensor.to(stored) for name, tensor in incoming.items()}, TaskArithmetic(1.0)).merged
    for name, tensor in base.items():
        rest = [row for row in range(8) if row != 2]
        assert torch.equal(found[name][rest], tensor[rest])
        torch.testing.assert_close(found[name][2], tensor[2] + 1, rtol=0.01, atol=0.01)


def test_both_layouts_of_a_half_precision_fine_tune_give_one_merge() -> None:
    fused = "visual.transformer.resblocks.0.attn.in_proj_weight"
    whole = tiny.randn(3 * WIDTH, WIDTH, seed=3)
    new = whole.clone()
    new[K, :3] += 0.1
    split = [f"vision_model.encoder.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    one = merged({fused: whole}, {fused: new.half()}, tiny.fast_method())
    other = merged(
        dict(zip(split, whole.split(WIDTH), strict=True)),
        dict(zip(split, new.half().split(WIDTH), strict=True)),
        tiny.fast_method(),
    )
    assert one.fingerprint() == other.fingerprint()
    assert torch.equal(one.merged[fused][V], whole[V])


BASE = torch.tensor([1.0001, -2.0003, 3.0])


@pytest.mark.parametrize(
    ("base", "new", "expected"),
    [
        (BASE, BASE.half(), BASE),
        (BASE, BASE.bfloat16(), BASE),
        (BASE.double(), BASE, BASE.double()),
        (BASE.half(), BASE.half().float(), BASE.half().float()),
        (BASE.half(), BASE, BASE),  # more bits than the base's: all of them count
        (BASE.bfloat16(), BASE.bfloat16().half(), BASE.bfloat16()),
        (BASE, BASE + 1, BASE + 1),
        (BASE, torch.tensor([1.0, 5.0, 3.0]).half(), torch.tensor([1.0001, 5.0, 3.0])),
    ],
)
def test_values_that_are_rounded_pretrained_ones_are_these(base: Tensor, new: Tensor, expected: Tensor) -> None:
    assert torch.equal(unrounded(base, new)[0].double(), expected.double())


def test_a_change_smaller_than_the_rounding_is_noted() -> None:
    name = "layers.0.mlp.fc1.weight"
    base = {name: tiny.randn(16, 16, seed=1)}
    grown = {name: base[name] + 4e-4 * base[name].abs() * (tiny.randn(16, 16, seed=2) > 1)}
    (note,) = merged(base, {name: grown[name].bfloat16()}, TaskArithmetic()).reports[0].notes
    assert note.startswith("rounding is larger than the change in 1 of the layers")
    assert name.removesuffix(".weight") in note
    assert merged(base, grown, TaskArithmetic()).reports[0].notes == ()
    large = {name: base[name] + tiny.randn(16, 16, seed=2) * (tiny.randn(16, 16, seed=3) > 1)}
    assert merged(base, {name: large[name].bfloat16()}, TaskArithmetic()).reports[0].notes == ()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_what_was_rounded_and_converted_back_is_told_by_its_values(stored: torch.dtype, wide: torch.dtype) -> None:
    """Trained or merged in half precision and saved in float32: the dtype no longer says so."""
    base = {"layers.0.self_attn.q_proj.weight": tiny.randn(8, 8), "layers.0.self_attn.k_proj.weight": tiny.randn(8, 8)}
    q, k = base
    expert = base | {q: base[q] + 0.1 * tiny.randn(8, 8, seed=1)}
    direct = merged(base, {name: tensor.to(stored) for name, tensor in expert.items()}, OPCM())
    back = merged(base, {name: tensor.to(stored).to(wide) for name, tensor in expert.items()}, OPCM())
    assert torch.equal(back.merged[k], base[k])
    tiny.assert_same(back.merged, direct.merged)


def test_a_change_in_full_precision_is_no_rounding() -> None:
    """However many of its first entries are exact in half precision."""
    base = tiny.randn(64, 8)
    new = base.half().float()
    new[-1, -1] += 1e-5
    assert torch.equal(unrounded(base, new)[0], new)
    turned = base.T
    assert torch.equal(unrounded(turned, new.T)[0], new.T)
    assert torch.equal(unrounded(turned, base.half().float().T)[0], turned)
