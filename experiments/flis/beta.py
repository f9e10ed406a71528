"""FLIS: clustering error over beta, by the server's data (thesis section 3.3.3, Figures 3.6 and 3.7).

Every client trains from w_0 once; the server lets the models predict each kind of server data, and for every
beta counts the pairs that are wrongly together (FP) and wrongly apart (FN), for the disjoint clusters of FLIS
(HC) and the overlapping ones of FLIS (DC). Clients with the same labels belong together::

    python experiments/flis/beta.py experiments/flis/fmnist.yaml --out runs/flis-beta.csv
    python experiments/flis/beta.py experiments/flis/fmnist.yaml --sources noise --betas 0.4,0.5
"""

from __future__ import annotations

import argparse
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

BETAS = np.round(np.arange(0, 1.0001, 0.05), 2)


def true_groups(federation: Federation) -> NDArray[np.int64]:
    """Clients with the same set of training labels are a group ``(N,)``."""
    kinds: dict[tuple[int, ...], int] = {}
    found = []
    for ids in federation.train:
        labels = tuple(np.unique(federation.samples.labels("train", ids)).tolist())
        found.append(kinds.setdefault(labels, len(kinds)))
    return np.array(found, np.int64)


def errors(
    similarities: NDArray[np.float64], groups: NDArray[np.int64], betas: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """A row for each beta and kind of clusters."""
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
    (found,), _ = cluster_without_training([config])
    distances = found.clusters.distances
    assert distances is not None  # few clients
    frame = pd.DataFrame(errors(1 - distances, groups, betas))
    same = squareform(groups[:, None] == groups, checks=False)
    similar = 1 - distances
    print(f"{found.seconds:.0f} s; A: {np.median(similar[same]):.3f} within groups (median), ", end="")
    print(f"{np.median(similar[~same]):.3f} across; {groups.max() + 1} groups, {same.sum()} true pairs")
    return frame


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a preset or YAML file")
    parser.add_argument("--sources", default="dataset,noise", help="kinds of server data, comma-separated")
    parser.add_argument("--betas", default=",".join(map(str, BETAS.tolist())))
    parser.add_argument("--one-hot", action="store_true", help="compare predicted classes")
    parser.add_argument("--out", type=Path, help="a CSV file")
    parser.add_argument("overrides", nargs="*", help="settings such as training.epochs=10")
    given = parser.parse_intermixed_args()
    betas, frames = [float(b) for b in given.betas.split(",")], []
    configs = {}
    for source in given.sources.split(","):
        data = f"{{source: {source}, one_hot: {given.one_hot}}}"
        flis = ["algorithm=flis_hc", f"clustering.signature={{name: predictions, data: {data}}}"]
        configs[source] = load(given.config, [*given.overrides, *flis])
    for source, config in configs.items():
        print(f"server data: {source}: ", end="", flush=True)
        frames.append(measure(config, betas).assign(source=source))
        table = pd.concat(frames, ignore_index=True)
        if given.out:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            table.to_csv(given.out, index=False)
    print(table.to_string(index=False))
    best = table.loc[table.groupby(["source", "method"])["error"].idxmin()]
    print("\nbest beta\n" + best.to_string(index=False))


if __name__ == "__main__":
    main()
