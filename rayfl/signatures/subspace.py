"""PACFL's signature: the subspace that holds most of a client's data."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.errors import DataError
from rayfl.linalg import leading_eigenpairs
from rayfl.signatures.base import Signature, sample_matrix

RANK_TOLERANCE = 1e-10
"""A direction belongs to the data if its squared singular value exceeds this share of the largest."""


class Subspace(Signature):
    """The first p left singular vectors of the client's data (PACFL).

    Vahidian et al., "Efficient distribution similarity identification in clustered federated learning via
    principal angles between client data subspaces", Algorithm 7: the columns of ``D_i`` (features x samples)
    are the client's samples, not centred; ``U_p^i`` are its first ``p`` left singular vectors. The authors'
    code takes ``p`` vectors of every class and concatenates them (``per_class``).
    """

    proximities: ClassVar[tuple[str, ...]] = ("principal_angle", "vector_angle_sum", "vector_angle_min")

    name: Literal["subspace"] = "subspace"
    p: int = Field(3, ge=1, description="number of singular vectors (p), of the client or of each class")
    per_class: bool = Field(False, description="p vectors of each class present, side by side")

    @override
    def needs_classes(self) -> bool:
        return self.per_class

    @property
    def vectors(self) -> int:
        """p, also with ``per_class``, where clients have p vectors per class: sums of angles are scaled to p
        vectors, since otherwise clients with many classes would be far from each other.
        """
        return self.p

    def compute(self, x: NDArray[np.floating], y: NDArray[np.integer], key: int = 0) -> NDArray[np.float32]:
        """``U_p``, ``(D, p')``: fewer columns than p if the samples span fewer dimensions.

        With ``per_class`` the columns are ordered by class.

        Raises:
            DataError: if there are no samples, they are not finite, or all are zero.
        """
        samples = sample_matrix(x)
        if not samples.any():
            raise DataError("subspace signature: all samples are zero, so they span no subspace")
        parts = [samples[y == label] for label in np.unique(y)] if self.per_class else [samples]
        bases = [leading_eigenpairs(part, self.p, RANK_TOLERANCE)[1] for part in parts]
        return np.concatenate(bases, axis=1).astype(np.float32)
