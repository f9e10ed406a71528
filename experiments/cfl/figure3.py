"""Figure 3 of the CFL paper: when does the optimal bipartition split no group?

::

    python experiments/cfl/figure3.py

Sattler, Mueller, Samek, *Clustered federated learning*, section II. The gradients of k true risks at a
stationary point are Gaussian vectors in d dimensions that sum to 0; each of m = 3k clients adds Gaussian
noise of relative length gamma (Eq. 16). Computed for each k and gamma: the share of draws with a correct
bipartition, and with a positive separation gap. Theorem 1 guarantees both for
``gamma < sin(pi / (4 (k - 1)))``; the paper finds them with probability about 1 even for k > 10 and
gamma > 1.

Writes ``figure3.csv``, ``figure3.md`` (for each k the guarantee, and the largest gamma with 95 % correct) and
``figure3.png``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rayfl.clustering.bipartition import bipartition, is_correct, separation_gap
from rayfl.clustering.cosines import condensed_cosines
from rayfl.random import generator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

matplotlib.use("Agg")

CLIENTS_PER_GROUP = 3
GROUPS = (2, 3, 4, 6, 8, 10, 12, 16, 20, 30)
NOISE = tuple(np.round(np.arange(0.1, 3.01, 0.1), 2).tolist())


def gradients(k: int, gamma: float, dimension: int, seed: int, draw: int) -> NDArray[np.float64]:
    """The gradients of the clients' empirical risks, ``(3k, d)``; client i belongs to group ``i mod k``."""
    random = generator(seed, "figure 3", k, draw)
    true = random.standard_normal((k, dimension))
    true -= true.mean(axis=0)  # the point is stationary (Eq. 104)
    noise = random.standard_normal((CLIENTS_PER_GROUP * k, dimension))
    signal = np.tile(true, (CLIENTS_PER_GROUP, 1))
    return np.asarray(signal + gamma * noise * _norms(signal) / _norms(noise), np.float64)


def _norms(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.norm(rows, axis=1, keepdims=True))


def guarantee(k: int) -> float:
    """The gamma below which Theorem 1 gives ``a_intra_min > a_cross_max``.

    Its bounds are ``a_intra >= cos h`` and ``a_cross <= cos(pi / (k - 1) - h)``, where
    ``cos h = H = 1 - 2 gamma^2``, so ``h = 2 arcsin gamma``; h has to be less than half of ``pi / (k - 1)``.
    """
    return float(np.sin(np.pi / (4 * (k - 1))))


def simulate(
    groups: Sequence[int], noise: Sequence[float], draws: int, dimension: int = 100, seed: int = 0
) -> pd.DataFrame:
    """A row for each k and gamma: shares of correct bipartitions and of positive gaps."""
    rows = []
    for k in groups:
        truth = np.arange(CLIENTS_PER_GROUP * k) % k
        for gamma in noise:
            correct = positive = 0
            for draw in range(draws):
                similarities, _ = condensed_cosines([gradients(k, gamma, dimension, seed, draw)])
                correct += is_correct(bipartition(similarities, range(len(truth))), truth)
                positive += separation_gap(similarities, truth) > 0
            rows.append(
                {"k": k, "gamma": gamma, "correct": correct / draws, "positive_gap": positive / draws}
            )
    return pd.DataFrame(rows)


def summary(table: pd.DataFrame, share: float = 0.95) -> pd.DataFrame:
    """For each k the largest gamma up to which at least ``share`` of the draws are correct; 0 if there is
    none.
    """
    rows = []
    for k, part in table.groupby("k"):
        row = {"k": k, "guaranteed below": guarantee(int(str(k)))}
        for column in ("correct", "positive_gap"):
            enough = (part.sort_values("gamma")[column] >= share).cumprod().astype(bool)
            row[column] = part.sort_values("gamma")["gamma"][enough].max() if enough.any() else 0.0
        rows.append(row)
    return pd.DataFrame(rows)


def markdown(table: pd.DataFrame) -> str:
    """The summary as a table."""
    lines = [
        "| k | guaranteed below | 95 % correct up to | 95 % positive gap up to |",
        "| --: | --: | --: | --: |",
    ]
    for row in table.itertuples(index=False):
        lines.append(f"| {row[0]} | {row[1]:.2f} | {row[2]:.1f} | {row[3]:.1f} |")
    return "\n".join(lines) + "\n"


def draw_figure(table: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    for ax, column, title in zip(
        axes, ("correct", "positive_gap"), ("correct bipartition", "separation gap > 0"), strict=True
    ):
        grid = table.pivot(index="gamma", columns="k", values=column)
        image = ax.pcolormesh(range(len(grid.columns)), grid.index, grid, vmin=0, vmax=1, cmap="Blues")
        ax.plot(range(len(grid.columns)), [guarantee(int(k)) for k in grid.columns], "g.-", label="Theorem 1")
        ax.set_xticks(range(len(grid.columns)), [str(k) for k in grid.columns])
        ax.set(xlabel="groups k", title=title)
        ax.legend(loc="upper right")
    axes[0].set_ylabel("relative noise gamma")
    figure.colorbar(image, ax=axes, label="share of draws")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def work(options: argparse.Namespace) -> None:
    (seed,) = options.seeds
    table = simulate(options.groups, NOISE, options.draws, options.dimension, seed)
    table.to_csv(options.out / "figure3.csv", index=False)
    text = markdown(summary(table))
    (options.out / "figure3.md").write_text(text)
    draw_figure(table, options.out / "figure3.png")
    print(text, end="")


if __name__ == "__main__":
    OPTIONS = (
        frame.option("--groups", type=int, nargs="+", default=list(GROUPS), help="k, at least 2"),
        frame.option("--draws", type=int, default=100),
        frame.option("--dimension", type=int, default=100),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS, seeds="0", out="runs/figure3"))
