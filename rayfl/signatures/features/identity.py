"""Raw pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.signatures.features.base import FeatureMap, flat


@dataclass(frozen=True)
class Pixels:
    """The identity, up to flattening."""

    @property
    def floats(self) -> int:
        """Nothing is sent."""
        return 0

    def apply(self, x: NDArray[np.floating], key: int = 0) -> NDArray[np.float32]:
        """The pixels ``(n, D)``."""
        return flat(x).astype(np.float32, copy=False)


class Identity(FeatureMap):
    """Raw pixels: what PACFL uses, and MT-HFL on Fashion-MNIST."""

    name: Literal["identity"] = "identity"

    def fit(self, x: NDArray[np.floating], key: int = 0) -> Pixels:
        """Nothing to prepare."""
        return Pixels()
