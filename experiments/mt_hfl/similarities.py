"""MT-HFL, Tables I and II and Figure 4: similarities R of users, which need no training.

::

    python experiments/mt_hfl/similarities.py --seeds 0-4

- Table I: five users of CIFAR-10, two with vehicles, three with animals.
- Table II: a user with vehicles of CIFAR-10, one with vehicles of CIFAR-100, one with other classes of it.
- Figure 4: Fashion-MNIST's three tasks, over the number q of eigenvectors that users exchange. Users 0 and 3
  have the same task, users 6 and 9 others.

The paper's features of CIFAR are those of a ResNet-18 trained on ImageNet; here they are a PCA of the server,
unless ``--features resnet18`` is given, which downloads the network, or ``identity``, the images themselves.
The paper prints no numbers of samples; here users of CIFAR have 2,000 images, and those of Figure 4 the
preset's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import squareform

from rayfl.commands.cluster import cluster_without_training
from rayfl.config import load
from rayfl.data import DATASETS, data_root

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

VEHICLES, ANIMALS = [0, 1, 8, 9], [2, 3, 4, 5, 6, 7]
VEHICLES_100 = [8, 13, 41, 48, 58, 69, 81, 85, 89, 90]
"""CIFAR-100's classes of the superclasses vehicles 1 and vehicles 2."""
EIGENVECTORS = (1, 2, 3, 5, 10, 20, 50)
TABLE_I = [
    [1, 0.97, 0.31, 0.31, 0.32],
    [0.97, 1, 0.31, 0.32, 0.32],
    [0.31, 0.31, 1, 0.97, 0.98],
    [0.31, 0.32, 0.97, 1, 0.98],
    [0.32, 0.32, 0.98, 0.98, 1],
]
TABLE_II = (0.62, 0.39)


def similarities(preset: str, overrides: Sequence[str], seeds: Sequence[int]) -> NDArray[np.float64]:
    """R of all users for each seed ``(seeds, N, N)``."""
    found = []
    for seed in seeds:
        config = load(preset, [*overrides, f"seed={seed}", "execution.backend=inline"])
        (result,), _ = cluster_without_training([config])
        assert result.clusters.distances is not None
        found.append(1 - squareform(result.clusters.distances))
    return np.stack(found)


def tasks(*users: tuple[Sequence[int], int], samples: int = 2000) -> list[str]:
    """A partition into tasks, each with its labels and number of users, without labels of other tasks."""
    listed = ", ".join(f"{{labels: {list(labels)}, clients: {n}, samples: {samples}}}" for labels, n in users)
    return [
        f"partition={{name: tasks, foreign: 0, tasks: [{listed}]}}",
        f"clustering.n_clusters={len(users)}",
    ]


def both_datasets(folder: Path) -> Path:
    """CIFAR-10 and CIFAR-100 in one file; the classes of CIFAR-100 come after those of CIFAR-10."""
    first, second = (DATASETS[name]().load(data_root()) for name in ("cifar10", "cifar100"))
    file = folder / "cifar.npz"
    np.savez(
        file,
        x_train=np.concatenate([first.x_train, second.x_train]),
        y_train=np.concatenate([first.y_train, second.y_train + first.classes]),
        x_test=np.concatenate([first.x_test, second.x_test]),
        y_test=np.concatenate([first.y_test, second.y_test + first.classes]),
    )
    return file


def work(options: argparse.Namespace) -> None:
    """Print the three tables, each as mean ± standard deviation over the seeds."""
    seeds, features = options.seeds, [f"clustering.features={options.features}"]
    r = similarities("mthfl-cifar10", [*tasks((VEHICLES, 2), (ANIMALS, 3)), *features], seeds)
    print(f"Table I, {options.features}, seeds {seeds}\n")
    print("| user | " + " | ".join(str(user + 1) for user in range(5)) + " | paper |")
    print("| --- " + "| --: " * 5 + "| --- |")
    for user in range(5):
        paper = ", ".join(f"{value:g}" for value in TABLE_I[user])
        print(f"| {user + 1} | {' | '.join(_cell(r[:, user, other]) for other in range(5))} | {paper} |")

    vehicles = [10 + label for label in VEHICLES_100]
    others = [label for label in range(10, 110) if label not in vehicles]
    users = tasks((VEHICLES, 1), (vehicles, 1), (others, 1))
    with tempfile.TemporaryDirectory() as folder:
        data = f"data={{name: npz, path: '{both_datasets(Path(folder))}', server_share: 2000}}"
        r = similarities("mthfl-cifar10", [data, *users, *features], seeds)
    print(f"\nTable II, {options.features}\n")
    print("| | CIFAR-100, vehicles | CIFAR-100, others |\n| --- | --: | --: |")
    print(f"| CIFAR-10, vehicles | {_cell(r[:, 0, 1])} | {_cell(r[:, 0, 2])} |")
    print(f"| paper | {TABLE_II[0]} | {TABLE_II[1]} |")

    print("\nFigure 4\n\n| q | users 0 and 3 (same task) | 0 and 6 | 0 and 9 |\n| --: | --: | --: | --: |")
    for q in EIGENVECTORS:
        r = similarities("mthfl-fmnist", [f"clustering.signature.q={q}"], seeds)
        print(f"| {q} | {_cell(r[:, 0, 3])} | {_cell(r[:, 0, 6])} | {_cell(r[:, 0, 9])} |")


def _cell(values: NDArray[np.float64]) -> str:
    return f"{values.mean():.2f} ± {values.std(ddof=1) if len(values) > 1 else 0:.2f}"


if __name__ == "__main__":
    FEATURES = frame.option(
        "--features", default="pca", choices=["pca", "resnet18", "identity"], help="of CIFAR's images"
    )
    sys.exit(frame.main(__doc__, work, FEATURES, seeds="0-4"))
