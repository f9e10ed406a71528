"""Softmax regression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rayfl.models.base import Model, fan_in, named

if TYPE_CHECKING:
    from torch import nn


class Linear(Model):
    """Softmax regression: one linear map from the flattened sample to the logits."""

    name: Literal["linear"] = "linear"

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """One layer, ``fc1``."""
        return {"fc1": ("fc1",)}

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """``D * classes + classes`` parameters."""
        from torch import nn

        return named(("flatten", nn.Flatten()), ("fc1", nn.Linear(fan_in(shape), classes)))
