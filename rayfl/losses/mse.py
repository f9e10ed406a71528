"""Mean squared error: regression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rayfl.losses.base import Loss

if TYPE_CHECKING:
    from torch import Tensor


class MeanSquaredError(Loss):
    """Mean squared error of one or more numbers, for regression; RMSE, MAE and R2 of each client.

    As PyTorch's ``MSELoss``: the mean over samples and outputs. The measures are those of scikit-learn
    (``root_mean_squared_error``, ``mean_absolute_error``, ``r2_score``), averaged over outputs. R2 is 1 minus
    the squared errors over those of predicting the client's mean target; NaN with fewer than two samples.
    """

    numeric: ClassVar[bool] = True
    accurate: ClassVar[bool] = False
    measures: ClassVar[Mapping[str, str]] = {
        "rmse": "root mean squared error",
        "mae": "mean absolute error",
        "r2": "coefficient of determination, at best 1",
    }
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"rmse", "mae"})

    name: Literal["mse"] = "mse"

    @override
    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1)

    @override
    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.mse_loss(outputs, targets)

    @override
    def width(self, outputs: int) -> int:
        return 4 * outputs

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        import torch

        truth = targets.double()
        errors = outputs.double() - truth
        return torch.cat([errors.square(), errors.abs(), truth, truth.square()], dim=1)

    @override
    def measured(self, sums: NDArray[np.float64], sizes: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        squared, absolute, total, squares = np.split(sums, 4, axis=1)  # (N, K) each
        n = np.where(sizes > 0, sizes, np.nan)[:, None]
        spread = np.maximum(0.0, squares - total**2 / n)
        spread[spread <= 1e-12 * squares] = 0.0  # rounding: all targets are equal
        with np.errstate(invalid="ignore", divide="ignore"):
            explained = np.where(spread > 0, 1 - squared / spread, np.where(squared > 0, 0.0, 1.0))
        return {
            "rmse": np.sqrt(squared / n).mean(1),
            "mae": (absolute / n).mean(1),
            "r2": np.where(sizes > 1, explained.mean(1), np.nan),
        }
