"""Thesis Table 5.3: the average distance between 100 clients under IID, C-NIID (2) and SC-NIID (2).

::

    python experiments/heterogeneity/table_5_3.py --seeds 0-2 [--data cifar10]

The thesis does not say in which unit its angles are, on how many samples they were computed, or which ground
distance its EMD has, so only the order can be compared. For each measure a row has the mean over the seeds
for each partition, and in how many seeds the three are in the thesis' order.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from rayfl.data import DATASETS, PARTITIONS, build_federation, data_root
from rayfl.data.heterogeneity.base import Measure
from rayfl.data.heterogeneity.distances import MEASURES, average_distance
from rayfl.data.heterogeneity.super_clusters import class_super_clusters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

PRINTED = {
    "emd": (0.042, 0.17, 0.29),
    "principal_angle": (0.072, 0.202, 0.274),
    "vector_angle_sum": (0.16, 0.28, 0.338),
    "cka": (0.94, 0.889, 0.825),
}


def work(options: argparse.Namespace) -> None:
    """Print the table."""
    seeds = options.seeds
    measures: dict[str, Measure] = {name: measure() for name, measure in MEASURES.items()}
    measures["emd, labels in order"] = MEASURES["emd"].model_validate({"ground": "order"})
    samples = DATASETS[options.data]().load(data_root())
    clusters = class_super_clusters(samples, n=2, per_class=1000).clusters
    print(f"super-clusters of {options.data}: {clusters}")
    settings: dict[str, dict[str, object]] = {
        "IID": {"name": "iid"},
        "C-NIID (2)": {"name": "label_skew", "rho": 0.2},
        "SC-NIID (2)": {"name": "sc_niid", "super_clusters": clusters},
    }
    partitions = {
        title: PARTITIONS[str(fields["name"])].model_validate({**fields, "clients": options.clients})
        for title, fields in settings.items()
    }
    values = {name: np.empty((len(seeds), len(partitions))) for name in measures}
    for i, seed in enumerate(seeds):
        for j, partition in enumerate(partitions.values()):
            federation = build_federation(samples, partition, validation=0, test_samples="auto", seed=seed)
            for name, measure in measures.items():
                values[name][i, j] = average_distance(federation, measure, None, seed).mean
    print(f"| measure | {' | '.join(partitions)} | in this order | thesis |")
    print("| --- | --: | --: | --: | --: | --: |")
    for name, rows in values.items():
        sign = -1 if measures[name].similarity else 1
        ordered = int((np.diff(sign * rows, axis=1) > 0).all(axis=1).sum())
        means = " | ".join(f"{value:.4g}" for value in rows.mean(axis=0))
        printed = " / ".join(map(str, PRINTED[name])) if name in PRINTED else "–"
        print(f"| {name} | {means} | {ordered} of {len(seeds)} | {printed} |")


if __name__ == "__main__":
    OPTIONS = (
        frame.option("--data", default="cifar10", choices=["cifar10", "fashion_mnist"]),
        frame.option("--clients", type=int, default=100),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS, seeds="0-2"))
