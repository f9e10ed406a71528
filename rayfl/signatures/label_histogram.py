"""A baseline signature: the client's label distribution itself."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.errors import DataError
from rayfl.signatures.base import Signature


class LabelHistogram(Signature):
    """The share of each class among the client's samples.

    It reveals the label distribution itself, so it is a reference for what other signatures find under label
    skew. It cannot distinguish clients that differ only in their inputs.
    """

    proximities: ClassVar[tuple[str, ...]] = ("euclidean", "cosine")
    uses_features: ClassVar[bool] = False

    classes_only: ClassVar[bool] = True
    padded: ClassVar[bool] = True

    name: Literal["label_histogram"] = "label_histogram"

    def compute(self, x: NDArray[np.floating], y: NDArray[np.integer], key: int = 0) -> NDArray[np.float32]:
        """Shares ``(c + 1,)``, where c is the largest label present; they sum to 1.

        Missing higher classes count as 0.

        Raises:
            DataError: if there are no samples.
        """
        if len(y) == 0:
            raise DataError("a label histogram needs at least one sample")
        return np.asarray(np.bincount(y) / len(y), dtype=np.float32)
