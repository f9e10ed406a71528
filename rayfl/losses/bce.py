"""Binary cross-entropy of several labels: multi-label classification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rayfl.errors import ConfigError
from rayfl.losses.base import Loss

if TYPE_CHECKING:
    from torch import Tensor


class BinaryCrossEntropy(Loss):
    """Binary cross-entropy of K labels that are true or not, each by itself (targets 0 and 1).

    As PyTorch's ``BCEWithLogitsLoss``: the mean over samples and labels, of logits. A label is predicted
    where its logit is above 0. ``accuracy`` is that of whole samples, all of whose labels must be right
    (subset accuracy). Also measured for each client, in percent and as defined by scikit-learn: the share of
    labels that are right, F1 over all labels together (micro), and the mean F1 of the labels (macro).
    """

    numeric: ClassVar[bool] = True
    measures: ClassVar[Mapping[str, str]] = {
        "label_accuracy": "% of labels that are right",
        "f1_micro": "F1 over all labels together, in %",
        "f1_macro": "mean F1 of the labels, in %",
    }

    name: Literal["bce"] = "bce"

    @override
    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)

    @override
    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.binary_cross_entropy_with_logits(outputs, targets)

    @override
    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs > 0) == (targets > 0)).all(1)

    @override
    def width(self, outputs: int) -> int:
        return 3 * outputs

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        import torch

        predicted, true = outputs > 0, targets > 0
        return torch.cat([predicted & true, predicted & ~true, ~predicted & true], dim=1).double()

    @override
    def measured(self, sums: NDArray[np.float64], sizes: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        hits, extra, missed = np.split(sums, 3, axis=1)  # (N, K) each
        wrong, n = extra + missed, np.where(sizes > 0, sizes, np.nan)
        labels = hits.shape[1]
        return {
            "label_accuracy": 100 * (1 - wrong.sum(1) / (labels * n)),
            "f1_micro": np.where(sizes > 0, _f1(hits.sum(1), wrong.sum(1)), np.nan),
            "f1_macro": np.where(sizes > 0, _f1(hits, wrong).mean(1), np.nan),
        }

    @override
    def check(self, targets: NDArray[np.float32]) -> None:
        wrong = targets[(targets != 0) & (targets != 1)]
        if len(wrong):
            what = f"'bce' takes labels 0 and 1; the data have {wrong[0]:g}"
            raise ConfigError("loss.name", what, "loss=mse predicts numbers")


def _f1(hits: NDArray[np.float64], wrong: NDArray[np.float64]) -> NDArray[np.float64]:
    """``2 TP / (2 TP + FP + FN)`` in percent; 0 where no label is true and none is predicted."""
    total = 2 * hits + wrong
    return np.asarray(np.divide(200 * hits, total, out=np.zeros_like(hits), where=total > 0))
