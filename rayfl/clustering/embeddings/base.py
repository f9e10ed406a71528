"""The interface of an embedding: the server maps all signatures into a common space of few dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfl.settings import Section


class Embedding(Section):
    """What the server does to the signatures of all clients before it compares them; chosen by name.

    Signatures are sets of points, ``(k_i, e)`` for client i, and stay sets of points: ``(k_i, u)``.
    """

    name: str

    joint: ClassVar[bool] = True
    """Whether the position of a client's points depends on the points of all clients."""

    def embed(
        self, signatures: Sequence[NDArray[np.floating]], key: int = 0
    ) -> Sequence[NDArray[np.floating]]:
        """The embedded signatures, in the same order.

        Args:
            signatures: the points of every client, ``(k_i, e)``.
            key: key of the random numbers, for embeddings that draw some.

        Raises:
            DataError: if these points cannot be embedded.
        """
        raise NotImplementedError
