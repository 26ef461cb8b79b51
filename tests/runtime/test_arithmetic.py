"""The arithmetic of a fold does not depend on the settings of its caller."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

from safemerge_pl.runtime.arithmetic import exact_arithmetic

CPU = torch.device("cpu")


@contextmanager
def low_precision() -> Iterator[None]:
    """Products of float32 may be worked out in TF32 or bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing": nullcontext,
    "low precision": low_precision,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
}


@pytest.mark.parametrize("around", AROUND)
def test_products_are_exact_and_plain(around: str) -> None:
    """1 + 2^-12 is a float32 that neither bfloat16 nor TF32 can hold."""
    fine = 1 + 2.0**-12
    weight = torch.full((1, 1), fine, requires_grad=True)
    with AROUND[around](), exact_arithmetic(CPU):
        product = weight @ torch.ones(1, 1)
        assert torch.get_float32_matmul_precision() == "highest"
    assert product.dtype == torch.float32
    assert product.item() == fine
    assert not product.requires_grad
    assert not product.is_inference()


def test_settings_of_the_caller_come_back_also_after_an_error() -> None:
    def fail() -> None:
        with exact_arithmetic(CPU):
            raise ArithmeticError("not finite")

    with low_precision(), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ArithmeticError, match="not finite"):
            fail()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.is_grad_enabled()
