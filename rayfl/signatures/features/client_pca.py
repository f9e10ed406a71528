"""Principal components of each client's own samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayfl.linalg import leading_eigenpairs, one_thread
from rayfl.signatures.base import sample_matrix
from rayfl.signatures.features.base import FeatureMap, flat


@dataclass(frozen=True)
class OwnComponents:
    """PCA of a client's own samples; the server sends only the dimension."""

    dim: int

    @property
    def floats(self) -> int:
        """Nothing is sent."""
        return 0

    def apply(self, x: NDArray[np.floating], key: int = 0) -> NDArray[np.float32]:
        """Coordinates ``(n, dim)`` along the client's own principal directions, its mean subtracted.

        Dimensions that the samples do not span are zero. Signs are chosen so that each direction's largest
        entry is positive.

        Raises:
            DataError: if there are no samples, or they are not finite.
        """
        rows = sample_matrix(flat(x))
        centred = rows - rows.mean(axis=0)
        features = np.zeros((len(rows), self.dim), np.float32)
        if centred.any():
            _, components = leading_eigenpairs(centred, self.dim, tiny=1e-10)
            with one_thread():
                features[:, : components.shape[1]] = centred @ components
        return features


class ClientPCA(FeatureMap):
    """PCA at each client, as in FLT's baseline PCA+kM+HC (Jamali-Rad et al. 2022, section 4.3).

    The paper has "linear principle component analysis followed by kMEANS (at client-side)", and the authors'
    code fits each client's PCA on its own samples. So every client has its own coordinates, which cannot be
    compared with those of others, and all means lie at the origin. For a fair linear map to compare an
    encoder with, use the features ``pca``, which are fitted once on the server's samples.
    """

    name: Literal["client_pca"] = "client_pca"
    dim: int = Field(128, ge=1, description="number of components (the length of a code)")

    def fit(self, x: NDArray[np.floating], key: int = 0) -> OwnComponents:
        """Nothing to prepare."""
        return OwnComponents(self.dim)
