"""FedNova: normalised averaging of clients that take different numbers of steps.

Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rayfl.errors import ConfigError
from rayfl.local.base import LocalObjective, Outcome, Start, accumulated
from rayfl.training import TrainedBlock, Training


class FedNova(LocalObjective):
    """``w <- w - eta tau_eff sum_i p_i d_i`` with ``d_i = (w - w_i) / (eta |a_i|_1)`` (Equation 7).

    ``p_i = n_i / n``; ``|a_i|_1`` is the number tau_i of local steps, with momentum rho
    ``[tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho)`` (:func:`rayfl.local.base.accumulated`);
    ``tau_eff = sum_i p_i |a_i|_1``. In terms of ``W_new = A W``: client i has weight ``n_i tau_eff /
    |a_i|_1``, and the old model gets the rest of ``n_i``.
    With equal numbers of steps this is FedAvg, bit for bit. Running statistics (BatchNorm) do not come from
    gradient steps; they are averaged as in FedAvg.
    """

    name: Literal["fednova"] = "fednova"

    def weights(
        self, sizes: NDArray[np.int64], rows: NDArray[np.int64], training: Training
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """The normalised weights within each model's clients."""
        n = sizes.astype(np.float64)
        steps = training.epochs * -(-sizes // training.batch_size)
        a = accumulated(steps, training.momentum, training.lr_alpha, training.lr_power)
        _, group = np.unique(rows, return_inverse=True)
        samples = np.bincount(group, weights=n)
        effective = (np.bincount(group, weights=n * a) / samples)[group]  # tau_eff
        # If all clients take equally many steps, the sums above may still round: set exactly 1.
        least, most = np.full(len(samples), np.inf), np.zeros(len(samples))
        np.minimum.at(least, group, a)
        np.maximum.at(most, group, a)
        ratio = np.where((least == most)[group], 1.0, effective / a)
        return n * ratio, n * (1 - ratio)

    def finish(self, start: Start, block: TrainedBlock) -> Outcome:
        """Refuse clients that made other numbers of local steps than :meth:`weights` counted.

        Raises:
            ConfigError: if the order of samples has more or fewer steps than shuffled batches.
        """
        counted = start.work.epochs * start.work.steps_an_epoch(start.sizes)
        for row in np.flatnonzero(block.steps != counted).tolist():
            if row not in block.failures:
                what = f"takes {block.steps[row]} local steps with {start.sizes[row]} samples"
                remedy = f"FedNova weighs clients by their steps and counts {counted[row]}"
                raise ConfigError("order", what, f"{remedy}, as many as shuffled batches take")
        return super().finish(start, block)

    def rescaled(self, weights: NDArray[np.float64], keep: NDArray[np.float64]) -> float:
        """``tau_eff`` of the clients that delivered over that of all: ``a_i / tau_eff = n_i / weight_i``."""
        n = weights + keep
        return float(n.sum() / (n * n / weights).sum()) ** -1
