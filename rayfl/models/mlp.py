"""Multi-layer perceptrons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rayfl.models.base import Model, fan_in, named

if TYPE_CHECKING:
    from torch import nn


class Mlp(Model):
    """Multi-layer perceptron with ReLU, on flattened samples.

    FLT's (Jamali-Rad et al., Table 11) is ``hidden: [200]`` with dropout 0.5.
    """

    name: Literal["mlp"] = "mlp"
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field((200,), description="units of each hidden layer")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout after each hidden layer; 0 for none")

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """``fc1``, ``fc2``, ...: one for each hidden layer, and the last for the logits."""
        return {f"fc{i}": (f"fc{i}",) for i in range(1, len(self.hidden) + 2)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Any shape suits; the sample is flattened."""
        from torch import nn

        children: list[tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
        width = fan_in(shape)
        for i, units in enumerate(self.hidden, start=1):
            children += [(f"fc{i}", nn.Linear(width, units)), (f"relu{i}", nn.ReLU())]
            if self.dropout > 0:
                children.append((f"dropout{i}", nn.Dropout(self.dropout)))
            width = units
        children.append((f"fc{len(self.hidden) + 1}", nn.Linear(width, classes)))
        return named(*children)
