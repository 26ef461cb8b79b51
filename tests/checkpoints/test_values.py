"""What numbers can be merged."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.checkpoints.tensors import Memory
from safemerge_pl.checkpoints.values import is_finite, plain_tensor, require_dtype, require_finite, require_values
from safemerge_pl.merger import ContinualMerger


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_none_is_found(bad: float, dtype: torch.dtype) -> None:
    values = torch.ones(1000, dtype=dtype)
    assert is_finite(values)
    values[717] = bad
    assert not is_finite(values)
    with pytest.raises(CheckpointError, match="a file: `x` has 1 NaN or Inf among 1000 values"):
        require_finite(values, "x", "a file")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_sum_that_overflows_is_no_infinity(dtype: torch.dtype) -> None:
    most = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(most)
    assert is_finite(torch.arange(3))
    assert not is_finite(torch.tensor([float("inf"), -float("inf")]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_packed_weight_is_named_as_its_reader_knows_it(dtype: torch.dtype) -> None:
    checkpoint = Memory({"x": torch.zeros(2).to(dtype)}, "a file")
    with pytest.raises(CheckpointError, match="a file: `x` is torch"):
        require_dtype(checkpoint, "x")
    with pytest.raises(CheckpointError, match=r"a file: `module\.x` is torch"):
        require_dtype(checkpoint, "x", "module.x")


def test_a_tensor_that_was_never_loaded_is_refused() -> None:
    with pytest.raises(CheckpointError, match="load the model whole"):
        require_values(torch.zeros(2, device="meta"), "x", "a module")


class Labelled(Tensor):
    """A subclass that only carries an attribute, as data loaders give them."""


def fake(tensor: Tensor) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


def sharded(tensor: Tensor) -> Any:
    found = tensor.as_subclass(Labelled)
    found.full_tensor = lambda: tensor  # type: ignore[attr-defined]  # what a DTensor has
    return found


NOT_PLAIN: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "COO": (lambda tensor: tensor.to_sparse(), r"is stored as torch\.sparse_coo; give it dense"),
    "CSR": (lambda tensor: tensor.to_sparse_csr(), r"is stored as torch\.sparse_csr; give it dense"),
    "BSR": (lambda tensor: tensor.to_sparse_bsr((4, 4)), r"is stored as torch\.sparse_bsr; give it dense"),
    "MKL-DNN": (lambda tensor: tensor.to_mkldnn(), r"is stored as torch\._mkldnn; give it dense"),
    "nested": (lambda tensor: torch.nested.nested_tensor(list(tensor)), "is a nested tensor"),
    "lazy": (lambda tensor: nn.parameter.UninitializedParameter(), "was never initialised .*run the model once"),
    "fake": (fake, "is a FakeTensor, which stands for a tensor"),
    "masked": (lambda tensor: torch.masked.masked_tensor(tensor, tensor > 0), "is a MaskedTensor"),
    "sharded": (sharded, "is sharded over processes .*`full_tensor"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about beta features
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_tensor_without_plain_entries_is_refused_on_either_side(kind: str) -> None:
    """Merged or not: an output could not hold it either."""
    make, reason = NOT_PLAIN[kind]
    base = tiny.tower()
    odd = make(base[tiny.FC1])
    merger = ContinualMerger(base, tiny.fast_method())
    with pytest.raises(CheckpointError, match=rf"`{tiny.FC1}` {reason}"):
        merger.fold(base | {tiny.FC1: odd}, "task1")
    assert merger.tasks == []
    for tensors in (base | {tiny.FC1: odd}, base | {"extra.buffer": odd}):
        with pytest.raises(CheckpointError, match=reason):
            ContinualMerger(tensors, tiny.fast_method())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_module_and_a_file_are_looked_at_too(tmp_path: Any) -> None:
    module = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(CheckpointError, match=r"a Sequential in memory: `0\.weight` was never initialised"):
        ContinualMerger(module, tiny.fast_method())
    torch.save({tiny.FC1: torch.eye(8).to_sparse()}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt: .*is stored as torch\.sparse_coo"):
        ContinualMerger(tmp_path / "model.pt", tiny.fast_method())


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "negated": lambda tensor: torch._neg_view(-tensor),
    "a parameter": nn.Parameter,
    "a subclass": lambda tensor: tensor.as_subclass(Labelled),
    "strided": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "of inference": lambda tensor: torch.inference_mode()(lambda: tensor.clone())(),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_another_view_of_the_same_values_gives_the_same_merge(kind: str) -> None:
    base, expert = tiny.tower(), tiny.tuned(tiny.tower(), 1)
    expected = tiny.fresh(base)
    expected.fold(expert, "task1")
    made = tiny.fresh(
        {
            name: VIEWS[kind](tensor) if tensor.ndim == 2 else tensor
            for name, tensor in base.items()
            if tensor.is_floating_point()
        }
    )
    report = made.fold(
        {name: VIEWS[kind](tensor) for name, tensor in expert.items() if tensor.is_floating_point()}, "task1"
    )
    assert report.incoming == expected.reports[0].incoming
    assert made.fingerprint() == expected.fingerprint()
    assert type(plain_tensor(VIEWS[kind](torch.ones(2, 2)), "x", "a mapping")) in (Tensor, nn.Parameter)
