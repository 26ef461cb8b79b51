"""What numbers can be merged."""

import pytest
import torch

from safemerge_pl.checkpoints import CheckpointError
from safemerge_pl.checkpoints.tensors import Memory
from safemerge_pl.checkpoints.values import is_finite, require_dtype, require_finite, require_values


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
