"""Linear centered kernel alignment of data matrices."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Samples
from rayfl.data.heterogeneity.base import Measure, refuse_texts
from rayfl.errors import DataError
from rayfl.linalg import one_thread

Matrix = NDArray[np.float32]


class Cka(Measure):
    """Linear centered kernel alignment (CKA) of the data matrices, from 0 to 1 (alike).

    Kornblith et al. 2019, arXiv:1905.00414: ``|B^T A|_F^2 / (|A^T A|_F |B^T B|_F)`` for matrices with the
    same rows and centred columns. Clients have no samples in common, so the rows are the features, as in
    PACFL's data matrix ``D_i`` (features x samples): the alignment of two ``D x D`` kernels between pixels.
    """

    similarity: ClassVar[bool] = True

    name: Literal["cka"] = "cka"
    samples: int | None = Field(100, ge=1, description="maximum number of samples per client; null: all")

    @override
    def common(self, samples: Samples, seed: int) -> None:
        refuse_texts(samples, "measure cka")

    @override
    def summary(
        self, x: NDArray[np.float32], y: NDArray[np.int64], classes: int, common: Any
    ) -> tuple[Matrix, float]:
        """The samples ``(n, D)``, each minus its mean, and the Frobenius norm of their kernel ``(n, n)``."""
        centred = x - x.mean(axis=1, keepdims=True)
        with one_thread():
            norm = float(np.linalg.norm(centred @ centred.T))
        if norm == 0:
            raise DataError("measure cka: all samples of a client are constant, so they cannot be aligned")
        return centred, norm

    @override
    def compare(self, a: tuple[Matrix, float], b: tuple[Matrix, float], common: Any) -> float:
        with one_thread():
            product = a[0] @ b[0].T
        return float(np.linalg.norm(product)) ** 2 / (a[1] * b[1])
