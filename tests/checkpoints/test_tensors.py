"""Tensors by name: fingerprints, tied names, tensors that are read when they are asked for."""

import re
import struct
from pathlib import Path

import pytest
import torch
from checkpoint_files import weights
from safetensors.torch import save_file
from torch import Tensor, nn

from safemerge_pl.checkpoints import fingerprint, open_checkpoint
from safemerge_pl.checkpoints.tensors import LazyTensors, Memory, View, is_floating, tied_names


def test_a_fingerprint_tells_names_dtypes_shapes_values_and_order_apart() -> None:
    x = torch.arange(6.0).view(2, 3)
    variants = {
        "same": {"a": x},
        "name": {"b": x},
        "dtype": {"a": x.half()},
        "bits": {"a": x.view(torch.int32)},
        "shape": {"a": x.view(3, 2)},
        "value": {"a": x + 1},
        "zero sign": {"a": -x},
        "twice": {"a": x, "b": x},
        "order": {"b": x, "a": x},
        "none": {},
    }
    prints = {fingerprint(tensors) for tensors in variants.values()}
    assert len(prints) == len(variants)
    assert all(re.fullmatch(r"[0-9a-f]{64}", found) for found in prints)


@pytest.mark.parametrize("tensor", weights().values(), ids=weights())
def test_a_fingerprint_looks_at_values_not_at_memory(tensor: Tensor) -> None:
    strided = torch.stack([tensor, tensor], dim=-1)[..., 0]
    assert fingerprint({"a": strided}) == fingerprint({"a": tensor.clone()})
    assert fingerprint({"a": nn.Parameter(strided, requires_grad=False)}) == fingerprint({"a": tensor})


def test_the_fingerprint_of_known_bytes() -> None:
    """Saved states are compared with it: it must not change between versions."""
    import hashlib

    content = hashlib.sha256(struct.pack("<2f", 1.0, -2.0)).hexdigest()
    expected = hashlib.sha256(f"a torch.float32 (2,) {content}\n".encode()).hexdigest()
    assert fingerprint({"a": torch.tensor([1.0, -2.0])}) == expected


# in memory, and read when they are asked for


def test_whether_a_lazy_tensor_is_there_is_known_without_reading_it() -> None:
    reads: list[str] = []
    lazy = LazyTensors(["a"], lambda name: reads.append(name) or torch.ones(1))  # type: ignore[func-returns-value]
    assert "a" in lazy
    assert "b" not in lazy
    assert (list(lazy), len(lazy), reads) == (["a"], 1, [])
    with pytest.raises(KeyError, match="b"):
        lazy["b"]
    assert lazy["a"].tolist() == lazy["a"].tolist() == [1.0]
    assert reads == ["a", "a"]


def test_names_of_one_tensor_are_told_from_those_of_equal_ones_and_of_parts() -> None:
    whole = torch.ones(2, 3)
    tensors = {"first": whole, "alias": whole, "copy": whole.clone(), "part": whole[:1], "none": torch.ones(0, 3)}
    assert tied_names(Memory(tensors | {"none too": torch.ones(0, 3)}, "a mapping")) == {"alias": "first"}
    on_meta = torch.ones(2, device="meta")
    assert tied_names(Memory({"a": on_meta, "b": on_meta}, "a mapping")) == {}


def test_a_tensor_in_a_format_of_eight_bits_is_not_floating(tmp_path: Path) -> None:
    """Its dtype cannot be given without an error."""
    save_file({"x": torch.zeros(2, 2).to(torch.float8_e4m3fn), "y": torch.zeros(2)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert [is_floating(checkpoint, name) for name in ("x", "y")] == [False, True]


def test_a_view_is_the_model_below_it() -> None:
    below = Memory(weights(), "a mapping", Path("somewhere"))
    view = View(below)
    assert (view.source, view.folder, list(view), len(view)) == (
        "a mapping",
        Path("somewhere"),
        list(below),
        len(below),
    )
    assert view.shapes() == below.shapes()
    assert view.dtype("mask") == torch.bool
    assert view["mask"] is below["mask"]
