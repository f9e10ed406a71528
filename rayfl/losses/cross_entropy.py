"""Cross-entropy, with smoothed labels if wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from rayfl.losses.base import IGNORED, Loss

if TYPE_CHECKING:
    from torch import Tensor


class CrossEntropy(Loss):
    """Cross-entropy of one of K classes, in nats, as PyTorch's; for texts that of the next word.

    With label smoothing (Szegedy et al. 2016) a client trains for the right class with probability
    ``1 - epsilon + epsilon / K`` and for each other one with ``epsilon / K``. Tests use no smoothing.
    """

    name: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="epsilon of label smoothing")

    @override
    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.cross_entropy(
            outputs, targets, reduction="none", label_smoothing=self.label_smoothing
        )

    @override
    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from torch.nn import functional

        smoothing = self.label_smoothing
        if targets.dim() == 1:
            return functional.cross_entropy(outputs, targets, label_smoothing=smoothing)
        total = functional.cross_entropy(outputs, targets, reduction="sum", label_smoothing=smoothing)
        return total / (targets != IGNORED).sum().clamp_min(1)

    @override
    def for_tests(self) -> Loss:
        return self.model_copy(update={"label_smoothing": 0.0}) if self.label_smoothing else self
