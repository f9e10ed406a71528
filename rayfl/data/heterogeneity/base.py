"""The contract of a measure between the data of two clients."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.data.base import Samples
from rayfl.errors import DataError
from rayfl.settings import Section

Array = NDArray[np.float64]


class Measure(Section):
    """How different the data of two clients are; subclasses are in ``heterogeneity/measures``.

    :meth:`common` first computes what all comparisons share from the whole dataset, such as a common
    coordinate system. Then each client is reduced to a summary (:meth:`summary`), and pairs of summaries are
    compared (:meth:`compare`).

    Attributes:
        similarity: whether a larger value means more similar data, as for CKA.
        labels_only: whether only labels are used, not inputs.
        unit: of the value, for reports.
    """

    similarity: ClassVar[bool] = False
    labels_only: ClassVar[bool] = False
    unit: ClassVar[str] = ""

    name: str = ""
    samples: int | None = Field(
        500, ge=1, description="maximum number of samples per client, drawn at random; null: all"
    )

    @property
    def directed(self) -> bool:
        """Whether the value from one client to another may differ from that in the opposite direction."""
        return False

    def common(self, samples: Samples, seed: int) -> Any:
        """What all comparisons share; by default nothing."""
        return None

    def summary(self, x: NDArray[np.float32], y: NDArray[np.int64], classes: int, common: Any) -> Any:
        """The summary of one client.

        Args:
            x: its inputs ``(n, D)``, pixels in [0, 1]; ``(n, 0)`` if the measure uses only labels.
            y: its labels ``(n,)``.
            classes: number of classes.
            common: the result of :meth:`common`.

        Raises:
            DataError: if the measure is not defined for these data.
        """
        raise NotImplementedError

    def compare(self, a: Any, b: Any, common: Any) -> float:
        """The value of the measure for two clients, from their summaries, which may be arrays of any
        shape.
        """
        raise NotImplementedError


def matrix(x: NDArray[np.generic]) -> NDArray[np.float32]:
    """Inputs as a matrix ``(n, D)``; bytes are scaled to [0, 1]."""
    values = x.reshape(len(x), -1).astype(np.float32)
    return values / np.float32(255) if x.dtype == np.uint8 else values


def refuse_texts(samples: Samples, what: str) -> None:
    """Refuse texts: words are indices into a vocabulary, for which angles and kernels have no meaning.

    Raises:
        DataError: if the samples are texts.
    """
    if samples.tokens:
        raise DataError(f"{what} compares numbers, {samples.name} holds words; compare labels, with emd")
