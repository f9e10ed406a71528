"""Signatures as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.clustering.embeddings.base import Embedding


class NoEmbedding(Embedding):
    """Signatures are compared as they are."""

    joint: ClassVar[bool] = False

    name: Literal["none"] = "none"

    def embed(
        self, signatures: Sequence[NDArray[np.floating]], key: int = 0
    ) -> Sequence[NDArray[np.floating]]:
        """Return the signatures ``(k_i, d)`` unchanged."""
        return signatures
