"""The maximum mean discrepancy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from rayfl.data.base import Samples
from rayfl.data.heterogeneity.base import Measure, matrix, refuse_texts
from rayfl.linalg import one_thread
from rayfl.random import generator

_BANDWIDTH_SAMPLES = 500

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class _Sample:
    x: Matrix
    squares: Matrix
    own: float


class Mmd(Measure):
    """Maximum mean discrepancy (MMD) of the samples under a Gaussian kernel, from 0 to sqrt(2).

    Gretton et al. 2012, the biased estimate: the distance between the mean embeddings of the two samples.
    The kernel is ``exp(-|x - y|^2 / m)``, m the median of the squared distances in the dataset unless
    ``bandwidth`` is given.
    """

    name: Literal["mmd"] = "mmd"
    samples: int | None = Field(100, ge=1, description="maximum number of samples per client; null: all")
    bandwidth: float | None = Field(None, gt=0, description="m; by default the median squared distance")

    @override
    def common(self, samples: Samples, seed: int) -> float:
        """The bandwidth m of the kernel."""
        refuse_texts(samples, "measure mmd")
        if self.bandwidth is not None:
            return self.bandwidth
        drawn = np.sort(
            generator(seed, "measure bandwidth").permutation(len(samples.x_train))[:_BANDWIDTH_SAMPLES]
        )
        x = matrix(samples.x_train[drawn])
        squares = (x * x).sum(axis=1)
        distances = _squared_distances(x, squares, x, squares)[np.triu_indices(len(x), 1)]
        positive = distances[distances > 0]
        return float(np.median(positive)) if len(positive) else 1.0

    @override
    def summary(self, x: NDArray[np.float32], y: NDArray[np.int64], classes: int, common: float) -> _Sample:
        squares = (x * x).sum(axis=1)
        return _Sample(x, squares, _mean_kernel(x, squares, x, squares, common))

    @override
    def compare(self, a: _Sample, b: _Sample, common: float) -> float:
        across = _mean_kernel(a.x, a.squares, b.x, b.squares, common)
        return float(np.sqrt(max(a.own + b.own - 2 * across, 0.0)))


def _mean_kernel(x: Matrix, xx: Matrix, y: Matrix, yy: Matrix, m: float) -> float:
    return float(np.exp(-_squared_distances(x, xx, y, yy) / m).mean(dtype=np.float64))


def _squared_distances(x: Matrix, xx: Matrix, y: Matrix, yy: Matrix) -> Matrix:
    with one_thread():
        product = x @ y.T
    return np.asarray(np.maximum(xx[:, None] + yy[None, :] - 2 * product, 0.0), np.float32)
