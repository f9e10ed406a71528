"""MT-HFL's perceptron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rayfl.models.base import Model, fan_in, named

if TYPE_CHECKING:
    from torch import nn


class MthflMlp(Model):
    """MT-HFL's perceptron for Fashion-MNIST: 784-32-classes with ReLU (Ali, Arafa, section III).

    The paper's log-softmax and negative log likelihood are here one cross-entropy on logits.
    """

    name: Literal["mthfl_mlp"] = "mthfl_mlp"

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """``fc1``, ``fc2``."""
        return {"fc1": ("fc1",), "fc2": ("fc2",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Any shape suits; the sample is flattened."""
        from torch import nn

        return named(
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(fan_in(shape), 32)),
            ("relu1", nn.ReLU()),
            ("fc2", nn.Linear(32, classes)),
        )
