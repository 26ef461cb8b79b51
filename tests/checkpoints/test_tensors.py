"""Tensors by name: fingerprints, tied names, tensors that are read when they are asked for."""

import re
import struct

import pytest
import torch
from checkpoint_files import weights
from torch import Tensor, nn

from safemerge_pl.checkpoints import fingerprint


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
