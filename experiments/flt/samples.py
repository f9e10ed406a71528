"""How many samples a client needs for FLT's FCR to find the groups, by distance, encoder and gamma.

::

    RAYFL_DATA=... python experiments/flt/samples.py --out runs/flt-samples

Clients hold EMNIST's letters in five groups of five, sizes by FLT's power law with at least half the mean,
as in the presets: a to e, f to j, ...; in the last case the groups are drawn at random. The encoder is
trained on Fashion-MNIST for two epochs, and then left as it is (J = 0), fine-tuned by every client on its
own letters for five epochs (J = 5, the paper), or fine-tuned for five epochs by the server, once for all
clients, on the test letters, which no client has here (the authors' code does so on all clients' training
data). Distances: that of the nearest centroids (the paper), or the least one of all centroids in pairs (the
authors' code). The table has the adjusted Rand index of five clusters against the groups.

Rows are written as they come; started again it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from recovery import FLT, GROUPS, signatures

from rayfl.clustering.cluster import embed, from_distances
from rayfl.clustering.config import Clustering
from rayfl.clustering.proximity import POINTS, condensed_distances
from rayfl.data import DATASETS, PARTITIONS, Samples, data_root
from rayfl.errors import RayflError
from rayfl.random import generator

MEANS = (12.5, 25.0, 50.0)
GAMMAS: tuple[float | str, ...] = ("auto", 1.0)
LABELS = 25
RANDOM = "groups at random, J = 0"
ENCODERS: dict[str, dict[str, Any]] = {
    "Fashion-MNIST, J = 0": {},
    "fine-tuned by clients, J = 5": {"fine_tune": 5},
    "fine-tuned by the server": {"fine_tune_shared": 5, "samples": 5200},
    RANDOM: {},
}


def fewer(samples: Samples, each: int) -> Samples:
    """The first ``each`` training samples of every label."""
    kept = np.concatenate([np.flatnonzero(samples.y_train == label)[:each] for label in range(LABELS)])
    return replace(samples, x_train=samples.x_train[kept], y_train=samples.y_train[kept])


def unit(letters: Samples, clients: int, mean: float, seed: int, encoder: str) -> Iterator[dict[str, Any]]:
    """A row for each distance and gamma."""
    samples = fewer(letters, round(mean * clients / LABELS))
    labels: NDArray[np.int64] = np.arange(LABELS)
    if encoder == RANDOM:
        labels = generator(seed, "labels of groups").permutation(LABELS)
    tasks = [{"labels": part.tolist(), "clients": clients // GROUPS} for part in np.split(labels, GROUPS)]
    settings = {"tasks": tasks, "sizes": "power", "spread": 2, "min_samples": int(mean / 2)}
    assignment = PARTITIONS["tasks"].model_validate(settings).assign(samples, seed)
    features = {"name": "conv_ae", **ENCODERS[encoder]}
    common = Clustering.model_validate({**FLT, "features": features, "n_clusters": GROUPS})
    found, _, _ = signatures(common, samples, assignment.clients, seed)
    points = embed(common, found, seed)
    for distance in POINTS:
        distances = condensed_distances(distance, points)
        for gamma in GAMMAS:
            asked = common.model_copy(update={"proximity": distance, "gamma": gamma})
            clusters = from_distances(asked, distances.copy(), assignment.groups)
            row = {"samples": mean, "seed": seed, "encoder": encoder, "distance": distance, "gamma": gamma}
            yield {**row, "chosen": clusters.gamma, "ari": clusters.ari}


def table(rows: pd.DataFrame) -> str:
    """Markdown: a line an encoder, distance and gamma; the mean over the seeds, and lowest to highest."""
    means = sorted(rows["samples"].unique())
    lines = [["encoder", "distance", "gamma", *(f"{mean:g} samples" for mean in means)]]
    lines.append(["---"] * 3 + ["--:"] * len(means))
    for names, part in rows.groupby(["encoder", "distance", "gamma"], sort=False):
        cells = [str(name) for name in names]
        for mean in means:
            ari = part.loc[part["samples"] == mean, "ari"]
            cells.append(f"{ari.mean():.2f} ({ari.min():.2f}–{ari.max():.2f})" if len(ari) else "")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--clients", type=int, default=300, help="number of clients")
    parser.add_argument("--means", type=float, nargs="+", default=MEANS, help="mean samples of a client")
    parser.add_argument("--out", type=Path, default=Path("runs/flt-samples"), help="folder of the results")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "samples.csv"
    rows: list[Any] = []
    if path.exists():
        rows = pd.read_csv(path, dtype={"gamma": str}).to_dict("records")
    done = {(row["samples"], row["seed"], row["encoder"]) for row in rows}
    try:
        letters = DATASETS["emnist"].model_validate({"name": "emnist", "split": "letters"}).load(data_root())
        for seed in range(options.seeds):
            for mean in options.means:
                for encoder in ENCODERS:
                    if (mean, seed, encoder) in done:
                        continue
                    new = list(unit(letters, options.clients, mean, seed, encoder))
                    rows += new
                    part = path.with_suffix(".part")
                    pd.DataFrame(rows).to_csv(part, index=False)
                    part.replace(path)
                    print(mean, seed, encoder, *(f"{row['ari']:.2f}" for row in new), flush=True)
    except RayflError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = table(pd.read_csv(path, dtype={"gamma": str}))
    (options.out / "samples.md").write_text(found)
    print(f"\n{found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
