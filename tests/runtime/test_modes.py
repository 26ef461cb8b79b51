"""Training and evaluation mode of a module."""

import pytest
from torch import nn

from safemerge_pl.runtime.modes import evaluating


def test_each_part_has_its_own_mode_again() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].eval()

    def breaks() -> None:
        with evaluating(model):
            assert not any(part.training for part in model.modules())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        breaks()
    assert [part.training for part in model.modules()] == [True, True, False, False]
