"""FedSEM as the authors of FLT implement it: all clients are clustered, even those that have not trained.

::

    RAYFL_DATA=... python experiments/flt/fedsem.py --out runs/flt-fedsem

In FLT's code (github hjraad/FLT, ``src/optim/flt.py`` with ``multi_center``) the server holds a model of
each client. In each round a sampled fifth of the clients trains. Then k-means over *all* N models,
starting from the previous centers, forms the clusters, and a center's model becomes the mean of all its
members, weighted by n_i. So in the first round k-means sees N/5 trained models and 4N/5 copies of w_0, which
occupy a center, and a center moves only by the share of its members that took part. Clients that have not
trained are tested with the center of w_0. rayfl's FedSEM forms centers from trained models only, averages
those that took part, and lets a client that it has not seen choose the center with the lowest training loss.

The models of clients that did not train equal their center, so the state is C centers and the assignment of
the clients. (The original code averages in place, so that later members of a center see the averages of
earlier ones; this script does not.)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from rayfl.clustering.quality import adjusted_rand_index
from rayfl.config import load
from rayfl.random import generator, key
from rayfl.servers.building import build
from rayfl.training import LocalWork
from rayfl.training.batches import Batches
from rayfl.training.engine import open_engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

C = 5
"""Number of centers."""

TOGETHER = 40
"""Clients that train in one call."""


def regroup(
    trained: NDArray[np.float32], centers: NDArray[np.float32], resting: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """k-means of all models.

    Args:
        trained: of the clients that took part ``(M, P)``.
        centers: ``(C, P)``; ``(1, P)`` before the first round.
        resting: how many clients that did not train are at each center ``(C,)`` or ``(1,)``.
        seed: of the first k-means.

    Returns:
        The new center of each trained model ``(M,)``, and of the clients at each old center ``(C,)``.
    """
    points = np.concatenate([trained, centers])
    weights = np.concatenate([np.ones(len(trained)), resting])
    first = len(centers) == 1
    kmeans = KMeans(C, n_init=20, random_state=seed) if first else KMeans(C, init=centers, n_init=1)
    labels = kmeans.fit(points, sample_weight=np.maximum(weights, 1e-9)).labels_.astype(np.int64)
    return labels[: len(trained)], labels[len(trained) :]


def work(options: argparse.Namespace) -> None:
    """Run this FedSEM and write a row for every test."""
    config = load(options.config, ["algorithm=fedavg"])
    torch.set_num_threads(1)
    (stage, *_), host = build(config)
    federation, clients = stage.federation, stage.federation.clients
    assert federation.groups is not None
    batches = Batches(federation.samples, torch.device("cpu"))
    engine, _ = open_engine(host.engine, host.spec, batches, config.seed)
    t = config.training
    work = LocalWork(t.epochs, t.batch_size, t.lr, t.momentum)
    sizes = federation.sizes.astype(np.float64)
    network = host.spec.build().eval()
    centers = host.spec.initial()[None]
    member: NDArray[np.int64] = np.zeros(clients, np.int64)
    met = np.zeros(clients, np.bool_)
    rows: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        rng = generator(config.seed, "experiment cohort", turn)
        cohort = np.sort(rng.choice(clients, round(t.participation * clients), replace=False))
        met[cohort] = True
        trained = np.empty((len(cohort), centers.shape[1]), np.float32)
        for first in range(0, len(cohort), TOGETHER):
            ids = cohort[first : first + TOGETHER]
            start = torch.from_numpy(centers[member[ids]])
            indices = federation.train.take(ids)
            block = engine.train(work, turn, ids.tolist(), indices, start)
            trained[first : first + len(ids)] = block.rows.numpy()
        absent = np.ones(clients, np.bool_)
        absent[cohort] = False
        resting = np.bincount(member[absent], minlength=len(centers))
        chosen, moved = regroup(trained, centers, resting, key(config.seed, "fedsem") % 2**32)
        sums, weight = np.zeros((C, centers.shape[1])), np.zeros(C)
        for client, model, label in zip(cohort.tolist(), trained, chosen.tolist(), strict=True):
            sums[label] += sizes[client] * model
            weight[label] += sizes[client]
        for old, label in enumerate(moved.tolist()):
            share = sizes[absent & (member == old)].sum()
            sums[label] += share * centers[old]
            weight[label] += share
        previous = centers if len(centers) == C else np.repeat(centers, C, axis=0)
        alive = weight > 0
        member = np.where(absent, moved[member], -1)
        member[cohort] = chosen
        centers = previous.copy()
        centers[alive] = (sums[alive] / weight[alive, None]).astype(np.float32)
        if (turn + 1) % options.every and turn + 1 < options.rounds:
            continue
        accuracy = np.empty(clients)
        for center in range(C):
            host.spec.load(network, centers[center])
            for client in np.flatnonzero(member == center).tolist():
                x, y = batches.test(federation.test[client])
                with torch.inference_mode():
                    accuracy[client] = float((network(x).argmax(1) == y).double().mean())
        row: dict[str, Any] = {
            "round": turn + 1,
            "accuracy": float(100 * accuracy.mean()),
            "ari": adjusted_rand_index(member, federation.groups),
            "members": np.sort(np.bincount(member, minlength=C))[::-1].tolist(),
            "not_seen": int((~met).sum()),
        }
        rows.append(row)
        print(row, flush=True)
        pd.DataFrame(rows).to_csv(options.out / f"fedsem-{options.config}.csv", index=False)


if __name__ == "__main__":
    OPTIONS = (
        frame.option("--config", default="flt-scenario4-mlp", help="the federation (C = 5)"),
        frame.option("--rounds", type=int, default=60),
        frame.option("--every", type=int, default=10, help="test after so many rounds"),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS, out="runs/flt-fedsem"))
