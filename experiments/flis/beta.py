"""FLIS: clustering error over beta for several kinds of server data (thesis section 3.3.3, Figures 3.6 and
3.7).

Every client trains once from w_0. The server lets the models predict each kind of server data. For every beta
the script counts the pairs that are wrongly together (FP) and wrongly apart (FN), for the disjoint clusters
of FLIS (HC) and the overlapping ones of FLIS (DC). Clients with the same labels belong together::

    python experiments/flis/beta.py experiments/flis/fmnist.yaml --out runs/flis-beta
    python experiments/flis/beta.py experiments/flis/fmnist.yaml --sources noise --betas 0.4,0.5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.spatial.distance import squareform

from rayfl.clustering.predictions import clustering_error, disjoint_clusters, joint_clusters
from rayfl.commands.cluster import cluster_without_training
from rayfl.config import Config, load
from rayfl.data import Federation
from rayfl.servers import building

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

BETAS = np.round(np.arange(0, 1.0001, 0.05), 2)


def true_groups(federation: Federation) -> NDArray[np.int64]:
    """The true group of each client ``(N,)``: clients with the same set of training labels."""
    kinds: dict[tuple[int, ...], int] = {}
    groups = []
    for ids in federation.train:
        labels = tuple(np.unique(federation.samples.labels("train", ids)).tolist())
        groups.append(kinds.setdefault(labels, len(kinds)))
    return np.array(groups, np.int64)


def errors(
    similarities: NDArray[np.float64], groups: NDArray[np.int64], betas: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each beta and kind of clusters."""
    for beta in betas:
        labels = disjoint_clusters(similarities, beta)
        for method, together, count in (
            ("HC", labels[:, None] == labels, int(labels.max()) + 1),
            ("DC", joint := joint_clusters(similarities, beta), len(np.unique(joint, axis=0))),
        ):
            fp, fn = clustering_error(together, groups)
            yield {"method": method, "beta": beta, "clusters": count, "FP": fp, "FN": fn, "error": fp + fn}


def measure(config: Config, betas: Sequence[float]) -> pd.DataFrame:
    """The errors of one kind of server data."""
    groups = true_groups(building.build(config)[0][0].federation)
    (result,), _ = cluster_without_training([config])
    distances = result.clusters.distances
    assert distances is not None  # few clients
    frame = pd.DataFrame(errors(1 - distances, groups, betas))
    same = squareform(groups[:, None] == groups, checks=False)
    similar = 1 - distances
    print(f"{result.seconds:.0f} s; A: {np.median(similar[same]):.3f} within groups (median), ", end="")
    print(f"{np.median(similar[~same]):.3f} across; {groups.max() + 1} groups, {same.sum()} true pairs")
    return frame


def work(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    betas, frames = [float(b) for b in options.betas.split(",")], []
    configs = {}
    for source in options.sources.split(","):
        data = f"{{source: {source}, one_hot: {options.one_hot}}}"
        flis = ["algorithm=flis_hc", f"clustering.signature={{name: predictions, data: {data}}}"]
        configs[source] = load(options.config, [*options.overrides, *flis])
    for source, config in configs.items():
        print(f"server data: {source}: ", end="", flush=True)
        frames.append(measure(config, betas).assign(source=source))
        table = pd.concat(frames, ignore_index=True)
        table.to_csv(options.out / "beta.csv", index=False)
    print(table.to_string(index=False))
    best = table.loc[table.groupby(["source", "method"])["error"].idxmin()]
    print("\nbest beta\n" + best.to_string(index=False))


if __name__ == "__main__":
    OPTIONS = (
        frame.option("config", help="a preset or YAML file"),
        frame.option("--sources", default="dataset,noise", help="kinds of server data, comma-separated"),
        frame.option("--betas", default=",".join(map(str, BETAS.tolist()))),
        frame.option("--one-hot", action="store_true", help="compare predicted classes"),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS, out="runs/flis-beta", overrides=True))
