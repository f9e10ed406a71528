"""The base of all losses: the cost of a model's outputs when the targets are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.settings import Section

if TYPE_CHECKING:
    from torch import Tensor


Task = Literal["numbers", "texts", "words"]
"""What a model predicts: one target for each sample of numbers (images, features), for each text, or for each
word of a text."""

IGNORED = -100
"""The target that counts in no loss and no accuracy (PyTorch's default ``ignore_index``)."""


class Loss(Section):
    """What clients minimise, chosen by name; subclasses are files of ``rayfl/losses``.

    A subclass adds ``name: Literal["..."] = "..."`` and its settings. The loss of a batch is the mean over
    its predictions, and the loss of one prediction depends on nothing else. So batches may be padded, and
    clients trained together.

    Shapes: n samples, K outputs of the model, N clients, S sums.
    """

    name: str = ""

    numeric: ClassVar[bool] = False
    """Whether targets are numbers ``(n, K)`` float32, and not classes ``(n,)`` int64."""

    accurate: ClassVar[bool] = True
    """Whether a prediction is right or wrong (:meth:`right`), so that there are accuracies."""

    measures: ClassVar[Mapping[str, str]] = {}
    """What else is measured for each client (:meth:`measured`): names, and their descriptions in tables."""

    lower_is_better: ClassVar[frozenset[str]] = frozenset()
    """The :attr:`measures` for which lower is better (errors); for all others higher is better."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Reset :meth:`mean` if only :meth:`each` is overridden: a parent's would compute its own loss."""
        super().__init_subclass__(**given)
        if "each" in vars(cls) and "mean" not in vars(cls):
            cls.mean = Loss.mean  # type: ignore[method-assign]

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each prediction ``(n,)``; for texts ``(n, L)``, 0 at positions without a target.

        Args:
            outputs: of the model, ``(n, K)``; for texts ``(n, K, L)``.
            targets: classes ``(n,)``, numbers ``(n, K)``, or the words of texts ``(n, L)``.
        """
        raise NotImplementedError

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch ``(B, ...)``, a scalar: the mean of :meth:`each` over all predictions.

        Positions of texts without a target are left out; 0 if no position has a target. Subclasses may
        compute it faster.
        """
        losses = self.each(outputs, targets)
        if losses.dim() == 1:
            return losses.mean()
        return losses.sum() / (targets != IGNORED).sum().clamp_min(1)

    def for_tests(self) -> Loss:
        """The loss that tests report: this one without terms that only apply in training."""
        return self

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Which predictions are right, ``(n,)`` bool; of texts ``(n, L)``."""
        return outputs.argmax(1) == targets

    def width(self, outputs: int) -> int:
        """S, the number of sums for this many outputs."""
        return 0

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Per-sample values whose sums :meth:`measured` needs, ``(n, S)`` float64."""
        return outputs.new_empty(len(outputs), 0).double()

    def measured(self, sums: NDArray[np.float64], sizes: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """The :attr:`measures` of clients ``(N,)`` each; NaN if undefined.

        Args:
            sums: over each client's samples ``(N, S)``.
            sizes: numbers of samples ``(N,)``.
        """
        return {}

    def check(self, targets: NDArray[np.float32]) -> None:
        """Refuse targets ``(n, K)`` for which the loss is not defined.

        Raises:
            ConfigError
        """
