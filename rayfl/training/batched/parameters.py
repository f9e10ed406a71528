"""The parameters of C clients side by side, and the SGD step that is fused into their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sgd:
    """``g + lambda w``, ``v = mu v + g``, ``w -= eta v``, as ``torch.optim.SGD``.

    Attributes:
        lr: eta.
        momentum: mu.
        weight_decay: lambda.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


class Parameter:
    """One tensor of the model for C clients, ``(C, *shape)``, contiguous so that products write into it.

    Args:
        value: the tensor.
        sgd: the step.
    """

    def __init__(self, value: torch.Tensor, sgd: Sgd) -> None:
        self._all, self._sgd = value, sgd
        self._velocity = torch.zeros_like(value) if sgd.momentum else None
        self.value, self.velocity = value, self._velocity

    def narrow(self, clients: int) -> None:
        """Only the first ``clients`` still train."""
        self.value = self._all[:clients]
        self.velocity = None if self._velocity is None else self._velocity[:clients]

    def descend(self, gradient: torch.Tensor) -> None:
        """One SGD step along ``gradient`` ``(C, *shape)``."""
        sgd = self._sgd
        if self.velocity is None:
            if sgd.weight_decay:
                self.value.mul_(1 - sgd.lr * sgd.weight_decay)
            self.value.add_(gradient, alpha=-sgd.lr)
        else:
            self.velocity.mul_(sgd.momentum).add_(gradient)
            self._move()

    def descend_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """One SGD step along the gradient ``left @ right``, which is never formed without momentum.

        Args:
            left: ``(C, m, k)``.
            right: ``(C, k, n)``, for a parameter ``(C, m, n)``.
        """
        sgd = self._sgd
        if self.velocity is None:
            self.value.baddbmm_(left, right, beta=1 - sgd.lr * sgd.weight_decay, alpha=-sgd.lr)
        else:
            self.velocity.baddbmm_(left, right, beta=sgd.momentum)
            self._move()

    def _move(self) -> None:
        assert self.velocity is not None
        if self._sgd.weight_decay:
            self.velocity.add_(self.value, alpha=self._sgd.weight_decay)
        self.value.add_(self.velocity, alpha=-self._sgd.lr)
