"""Task Arithmetic in small numbers."""

import pytest
from rivals import TINY_ERROR, error_of, states_of, twin_of
from tiny import Tensors
from torch import nn

from safemerge_pl.merger import ContinualMerger
from safemerge_pl.methods import TaskArithmetic

pytestmark = pytest.mark.usefixtures("one_thread")


def test_task_arithmetic_does_not_depend_on_the_order_of_tasks(clip: tuple[nn.Module, list[Tensors]]) -> None:
    pretrained = clip[0].state_dict()
    merger = ContinualMerger(pretrained, TaskArithmetic())
    states_of(merger, clip[1][::-1])
    assert error_of([merger.merged], twin_of(TaskArithmetic(), pretrained, clip[1])[-1:], pretrained) < TINY_ERROR
