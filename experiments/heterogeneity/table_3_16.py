"""Thesis Table 3.16: four pairs of Gaussian samples under all measures, over seeds.

::

    python experiments/heterogeneity/table_3_16.py --seeds 0-19

100 points each in 20 dimensions of N(mu, Sigma) and: N(2 mu, Sigma), N(3 mu, Sigma), N(mu, 2 Sigma),
N(mu, 5 Sigma). The thesis gives neither mu nor Sigma. Here both are drawn for every seed: mu has a random
direction and a length such that ``mu^T Sigma^-1 mu = 30`` (twice the printed KL of the first case); Sigma is
the unit matrix, or ``A A^T`` with Gaussian A, whose variances differ a thousandfold.

Two claims are counted: within each half of the table the second case is farther apart than the first (as the
thesis says), and all measures rank the four cases as Bhattacharyya's printed row does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rayfl.data import Federation, Ragged, Samples
from rayfl.data.heterogeneity.base import Measure
from rayfl.data.heterogeneity.distances import MEASURES, distance_matrix
from rayfl.random import generator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

CASES = {"2 mu": (2, 1), "3 mu": (3, 1), "2 Sigma": (1, 2), "5 Sigma": (1, 5)}
"""Factors of mu and Sigma."""
POINTS, DIMENSIONS = 100, 20
PRINTED = {
    "bhattacharyya": (3.07, 10.31, 1.14, 2.13),
    "kl": (15.18, 47.12, 3.31, 5.79),
    "mmd": (0.6218, 0.6238, 0.6234, 0.6246),
    "principal_angle": (10.73, 18.41, 8.93, 13.72),
    "vector_angle_sum": (32.2, 55.24, 26.79, 41.15),
}
RANKING = (2, 3, 0, 1)
"""The cases from near to far in the printed rows of Bhattacharyya and KL."""


def pair(seed: int, mean_factor: int, variance_factor: int, unit: bool) -> Federation:
    """Two clients, one of each distribution."""
    rng = generator(seed, "table 3.16")
    mean = rng.standard_normal(DIMENSIONS)
    a = rng.standard_normal((DIMENSIONS, DIMENSIONS))
    covariance = np.eye(DIMENSIONS) if unit else a @ a.T
    mean *= np.sqrt(30 / (mean @ np.linalg.solve(covariance, mean)))
    first = rng.multivariate_normal(mean, covariance, POINTS)
    second = rng.multivariate_normal(mean_factor * mean, variance_factor * covariance, POINTS)
    x = np.concatenate([first, second]).astype(np.float32)
    y = np.zeros(len(x), np.int64)
    lists = Ragged.of(np.split(np.arange(len(x)), 2))
    return Federation(Samples("gaussians", x, y, x, y, 1), lists, lists, lists)


def table(measures: dict[str, Measure], seeds: Sequence[int], unit: bool) -> dict[str, NDArray[np.float64]]:
    """The value of each measure for each seed and case ``(seeds, 4)``."""
    values: dict[str, NDArray[np.float64]] = {name: np.empty((len(seeds), len(CASES))) for name in measures}
    for i, seed in enumerate(seeds):
        for j, factors in enumerate(CASES.values()):
            federation = pair(seed, *factors, unit)
            for name, measure in measures.items():
                values[name][i, j] = distance_matrix(federation, measure)[0, 1]
    return values


def work(options: argparse.Namespace) -> None:
    """Print both tables."""
    seeds = options.seeds
    settings: dict[str, dict[str, object]] = {
        "bhattacharyya": {"ridge": 0},
        "kl": {"ridge": 0},
        "mmd": {},
        "principal_angle": {},
        "vector_angle_sum": {},
        "vector_angle_min": {},
        "cka": {},
    }
    measures = {name: MEASURES[name].model_validate(fields) for name, fields in settings.items()}
    measures["kl, first to second"] = MEASURES["kl"].model_validate({"ridge": 0, "symmetric": False})
    for unit in (True, False):
        print(f"\nSigma = {'I' if unit else 'A A^T'}, mean over {len(seeds)} seeds\n")
        print(f"| measure | {' | '.join(CASES)} | 3 mu > 2 mu | 5 Sigma > 2 Sigma | ranked so | thesis |")
        print("| --- " + "| --: " * 8 + "|")
        for name, rows in table(measures, seeds, unit).items():
            sign = -1 if measures[name].similarity else 1
            mean_pair = int((sign * rows[:, 1] > sign * rows[:, 0]).sum())
            variance_pair = int((sign * rows[:, 3] > sign * rows[:, 2]).sum())
            ranked = int((np.argsort(sign * rows, axis=1) == RANKING).all(axis=1).sum())
            means = " | ".join(f"{value:.4g}" for value in rows.mean(axis=0))
            printed = " / ".join(map(str, PRINTED[name])) if name in PRINTED else "–"
            print(f"| {name} | {means} | {mean_pair} | {variance_pair} | {ranked} | {printed} |")


if __name__ == "__main__":
    sys.exit(frame.main(__doc__, work, seeds="0-19"))
