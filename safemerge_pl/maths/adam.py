"""Adam for the inner optimisations: torch's defaults and bits, without autograd and per-step bookkeeping."""

import torch
from torch import Tensor

__all__ = ["Adam"]

_BLOCK = 2**15
"""Entries that are updated together on a CPU: five arrays of this size stay in a core's cache."""


class Adam:
    """Adam (Kingma and Ba 2015) on one flat tensor, with the betas and ``eps`` of ``torch.optim.Adam``.

    The optimiser of torch spends more time on hooks and parameter groups than on matrices of a few hundred rows, and
    sweeps large ones once an operation instead of once a step.

    Args:
        parameters: contiguous tensor, changed in place.
        lr: learning rate.

    Attributes:
        gradient: of the size of ``parameters``; to be filled before each :meth:`step`.

    Example:
        >>> x = torch.tensor([1.0, -2.0])
        >>> adam = Adam(x, lr=0.1)
        >>> _ = adam.gradient.copy_(torch.tensor([3.0, -0.5]))
        >>> adam.step()
        >>> [round(value, 3) for value in x.tolist()]  # the first step goes by the sign alone
        [0.9, -1.9]
    """

    beta1, beta2, eps = 0.9, 0.999, 1e-8

    def __init__(self, parameters: Tensor, lr: float) -> None:
        self.lr, self.steps = lr, 0
        self.gradient = torch.zeros_like(parameters)
        flat = [parameters.view(-1), self.gradient.view(-1)]
        flat += [torch.zeros_like(flat[0]) for _ in range(3)]  # first and second moment, and room for the step
        size = _BLOCK if parameters.device.type == "cpu" else max(1, flat[0].numel())
        self._blocks = list(zip(*(torch.split(tensor, size) for tensor in flat), strict=True))

    def step(self) -> None:
        """Move the parameters against :attr:`gradient`."""
        self.steps += 1
        step_size = self.lr / (1 - self.beta1**self.steps)
        correction = (1 - self.beta2**self.steps) ** 0.5
        for parameters, gradient, mean, square, room in self._blocks:
            mean.lerp_(gradient, 1 - self.beta1)
            square.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
            torch.sqrt(square, out=room).div_(correction).add_(self.eps)
            parameters.addcdiv_(mean, room, value=-step_size)
