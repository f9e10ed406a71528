"""Base of measures that fit a normal distribution to each client, in common coordinates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Samples
from rayfl.data.heterogeneity.base import Array, Measure, matrix, refuse_texts
from rayfl.errors import DataError
from rayfl.linalg import leading_eigenpairs, one_thread
from rayfl.random import generator

_COORDINATE_SAMPLES = 1000


@dataclass(frozen=True)
class Coordinates:
    """A linear map ``(x - origin) @ axes``, and the mean variance of the dataset along these axes."""

    origin: Array
    axes: Array
    variance: float


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution in d dimensions."""

    mean: Array
    covariance: Array
    log_determinant: float

    @classmethod
    def of(cls, mean: Array, covariance: Array) -> Gaussian:
        """From mean ``(d,)`` and a positive definite covariance ``(d, d)``."""
        return cls(mean, covariance, float(np.linalg.slogdet(covariance)[1]))


class GaussianMeasure(Measure):
    """Base of measures between normal distributions, one fitted to each client.

    The coordinates are the leading principal components of the dataset, the same for all clients. ``ridge``
    times the mean variance of the dataset is added to the diagonal of a client's covariance (computed with n
    - 1), so that it can be inverted even for a client with few samples.
    """

    dimensions: int = Field(20, ge=1, description="number of principal components of the dataset")
    ridge: float = Field(0.01, ge=0, description="added to the covariances, as a share of the mean variance")

    @override
    def common(self, samples: Samples, seed: int) -> Coordinates:
        refuse_texts(samples, f"measure {self.name}")
        rng = generator(seed, "measure coordinates")
        drawn = np.sort(rng.permutation(len(samples.x_train))[:_COORDINATE_SAMPLES])
        x = matrix(samples.x_train[drawn]).astype(np.float64)
        origin = x.mean(axis=0)
        if x.shape[1] <= self.dimensions:
            axes = np.eye(x.shape[1])
        else:
            axes = leading_eigenpairs(x - origin, self.dimensions, 1e-10)[1]
        with one_thread():
            variance = float(((x - origin) @ axes).var(axis=0).mean()) if axes.shape[1] else 0.0
        if variance == 0:
            raise DataError(f"measure {self.name}: all samples are the same and have no variance")
        return Coordinates(origin, axes, variance)

    @override
    def summary(
        self, x: NDArray[np.float32], y: NDArray[np.int64], classes: int, common: Coordinates
    ) -> Gaussian:
        with one_thread():
            z = (x - common.origin) @ common.axes
            centred = z - z.mean(axis=0)
            covariance = centred.T @ centred / max(len(z) - 1, 1)
        gaussian = Gaussian.of(
            z.mean(axis=0), covariance + self.ridge * common.variance * np.eye(len(covariance))
        )
        if not np.isfinite(gaussian.log_determinant):
            raise DataError(
                f"measure {self.name}: the covariance of {len(z)} samples in {len(covariance)} dimensions "
                "cannot be inverted; set ridge above 0"
            )
        return gaussian
