"""One-shot clustering of clients: FLT's FCR, its variants and its linear baseline.

::

    RAYFL_DATA=... python experiments/flt/recovery.py --out runs/flt-recovery

Planted groups on real images: EMNIST's letters in five groups of five letters, with sizes by FLT's power law,
and FLT's scenario 1 on Fashion-MNIST, five groups of two classes. The encoder is trained on the *other*
dataset (for letters on Fashion-MNIST). The table has the adjusted Rand index of clusters against groups, with
the number of clusters given (C = 5) and as the tree proposes it (the number in brackets).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rayfl.clustering.cluster import embed, from_distances
from rayfl.clustering.config import Clustering
from rayfl.clustering.proximity import condensed_distances
from rayfl.data import DATASETS, PARTITIONS, Samples, data_root
from rayfl.random import generator, key
from rayfl.signatures.base import Signature
from rayfl.training.batches import raw_features

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

GAMMAS: tuple[float | str, ...] = (1.0, 0.5, 0.3, "auto")
FLT = {"signature": "centroids", "features": "conv_ae", "embedding": "umap", "grouping": "graph"}
GROUPS = 5


def scenarios(least: int) -> dict[str, dict[str, Any]]:
    """The datasets, the labels and clients of each group, and the data that the encoder is trained on."""
    letters = {
        "data": {"name": "emnist", "split": "letters"},
        "labels": 5,
        "partition": {"sizes": "power", "min_samples": least},
        "pretrain": {"dataset": "fashion_mnist"},
    }
    return {
        "letters, 120 clients": {**letters, "clients": 120},
        "letters, 240 clients": {**letters, "clients": 240},
        "fashion_mnist, 100 clients": {
            "data": {"name": "fashion_mnist"},
            "labels": 2,
            "partition": {},
            "pretrain": {"dataset": {"name": "emnist", "split": "letters"}},
            "clients": 100,
        },
    }


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is compared: name and settings of the clustering."""
    for gamma in GAMMAS:
        yield f"FLT, gamma {gamma}", {**FLT, "gamma": gamma}
    hierarchical = {**FLT, "grouping": "hierarchical"}
    yield "average linkage on A", hierarchical
    yield "without UMAP, average", {**hierarchical, "embedding": "none"}
    yield "without UMAP, Ward", {**hierarchical, "embedding": "none", "linkage": "ward"}
    baseline = {**FLT, "features": "pca", "embedding": "none", "grouping": "hierarchical", "linkage": "ward"}
    yield "PCA+kM+HC, public PCA", baseline
    yield "PCA+kM+HC, clients' own PCA", {**baseline, "features": "client_pca"}


def signatures(
    clustering: Clustering, samples: Samples, clients: Sequence[np.ndarray[Any, Any]], seed: int
) -> tuple[list[Any], float, float]:
    """Signatures of all clients, seconds for the feature map, and seconds for the signatures."""
    start_time = time.perf_counter()
    rng = generator(seed, "public sample")
    public = clustering.features.public_samples
    drawn = np.sort(rng.choice(len(samples.x_test), min(public, len(samples.x_test)), replace=False))
    fitted = clustering.features.fit(raw_features(samples.x_test[drawn]), key(seed, "features"))
    fit = time.perf_counter() - start_time
    signature: Signature = clustering.signature
    computed = []
    for client, ids in enumerate(clients):
        x = fitted.apply(raw_features(samples.x_train[np.sort(ids)]), key(seed, "features", client))
        computed.append(signature.compute(x, samples.y_train[np.sort(ids)], key(seed, "signature", client)))
    return computed, fit, time.perf_counter() - start_time - fit


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each scenario, variant and seed."""
    for scenario, settings in scenarios(options.least).items():
        source = DATASETS[settings["data"]["name"]].model_validate(settings["data"])
        samples = source.load(source.root or data_root())
        for seed in options.seeds:
            labels = generator(seed, "labels of groups").permutation(settings["labels"] * GROUPS)
            tasks = [
                {"labels": part.tolist(), "clients": settings["clients"] // GROUPS}
                for part in np.split(labels, GROUPS)
            ]
            partition = PARTITIONS["tasks"].model_validate({"tasks": tasks, **settings["partition"]})
            assignment = partition.assign(samples, seed)
            cached: dict[str, tuple[Any, ...]] = {}
            for variant, changes in variants():
                features: Any = {"name": changes["features"]}
                if changes["features"] == "conv_ae":
                    features |= {"pretrain": settings["pretrain"], "fine_tune": options.fine_tune}
                clustering = Clustering.model_validate({**changes, "features": features})
                kind = changes["features"]
                if kind not in cached:
                    cached[kind] = signatures(clustering, samples, list(assignment.clients), seed)
                client_signatures, _, seconds = cached[kind]
                space = f"{kind} {clustering.embedding.name}"
                if space not in cached:
                    points = embed(clustering, client_signatures, seed)
                    cached[space] = (condensed_distances(clustering.measure, points),)
                distances = cached[space][0]
                row = {"scenario": scenario, "variant": variant, "seed": seed, "sign_seconds": seconds}
                for name, count in (("given", GROUPS), ("proposed", None)):
                    asked = clustering.model_copy(update={"n_clusters": count})
                    clusters = from_distances(asked, distances.copy(), assignment.groups)
                    row |= {f"ari_{name}": clusters.ari, f"gamma_{name}": clusters.gamma}
                    row[f"clusters_{name}"] = clusters.n_clusters
                print(
                    scenario, variant, seed, f"{row['ari_given']:.2f} {row['ari_proposed']:.2f}", flush=True
                )
                yield row


def table(rows: pd.DataFrame) -> str:
    """Markdown: one line per variant, one column per scenario; lowest to highest over the seeds."""
    names = list(dict.fromkeys(rows["scenario"]))
    lines = [["", *(f"{name}{how}" for name in names for how in (", C = 5", ", proposed"))]]
    lines.append(["---"] * len(lines[0]))
    for variant, part in rows.groupby("variant", sort=False):
        cells = [str(variant)]
        for name in names:
            cell_rows = part[part["scenario"] == name]
            cells.append(_spread(cell_rows["ari_given"]))
            counts = sorted(set(cell_rows["clusters_proposed"]))
            chosen = "" if "auto" not in str(variant) else f", gamma {_spread(cell_rows['gamma_proposed'])}"
            cells.append(f"{_spread(cell_rows['ari_proposed'])} ({', '.join(map(str, counts))}{chosen})")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _spread(values: pd.Series[float]) -> str:
    low, high = f"{values.min():.2f}", f"{values.max():.2f}"
    return low if low == high else f"{low}–{high}"


def work(options: argparse.Namespace) -> None:
    """Measure, write and print the table."""
    rows = pd.DataFrame(list(run(options)))
    rows.to_csv(options.out / "recovery.csv", index=False)
    (options.out / "recovery.md").write_text(table(rows))
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    OPTIONS = (
        frame.option("--least", type=int, default=50, help="least samples of a client (alpha of Alg. 4)"),
        frame.option("--fine-tune", type=int, default=0, help="epochs of fine-tuning by each client (J)"),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS, seeds="0-2", out="runs/flt-recovery"))
