"""PACFL's three angles between the subspaces of the clients' data."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.angles import ANGLES
from rayfl.data.base import Samples
from rayfl.data.heterogeneity.base import Array, Measure, refuse_texts
from rayfl.errors import DataError
from rayfl.linalg import leading_eigenpairs, one_thread


class _Angle(Measure):
    """The columns of ``D_i`` are the client's samples, not centred; ``U_i`` its first p singular vectors."""

    unit: ClassVar[str] = "degrees"

    p: int = Field(3, ge=1, description="number of singular vectors per client")

    @override
    def common(self, samples: Samples, seed: int) -> None:
        refuse_texts(samples, f"measure {self.name}")

    @override
    def summary(self, x: NDArray[np.float32], y: NDArray[np.int64], classes: int, common: Any) -> Array:
        if not x.any():
            raise DataError(f"measure {self.name}: all samples of a client are zero and span no subspace")
        return leading_eigenpairs(x.astype(np.float64), self.p, 1e-10)[1]

    @override
    def compare(self, a: Array, b: Array, common: Any) -> float:
        with one_thread():
            return float(ANGLES[self.name](a.T @ b, self.p))


class PrincipalAngle(_Angle):
    """Smallest principal angle between the subspaces of the data (thesis Eq. 3.1 and 5.1), in degrees."""

    name: Literal["principal_angle"] = "principal_angle"


class VectorAngleSum(_Angle):
    """Sum of the angles between singular vectors of equal rank (thesis Eq. 3.2 and 5.2), in degrees."""

    name: Literal["vector_angle_sum"] = "vector_angle_sum"


class VectorAngleMin(_Angle):
    """Smallest angle between any two singular vectors (what the thesis' figures show), in degrees."""

    name: Literal["vector_angle_min"] = "vector_angle_min"
