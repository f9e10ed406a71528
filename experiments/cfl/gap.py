"""CFL's separation gap on real data, from a plain sequential loop: an oracle that shares no code with rayfl.

::

    python experiments/cfl/gap.py DATA              # Figures 5 and 6, and every split
    python experiments/cfl/gap.py DATA --control    # Figure 7: clients that must not be split
    python experiments/cfl/gap.py DATA --cfl 0.12 0.35 0 --samples 100  # CFL: eps1 eps2 gamma_max

Sattler, Mueller, Samek, *Clustered federated learning*, VI-A and VI-B: m = 20 clients in k = 4 groups, in
each of which two labels are swapped; FedAvg with three local epochs. After every round, over the clients'
updates d_i from the common model:

- ``gap``: g = smallest similarity within a group - largest across the optimal bipartition (Eq. 28, 29);
- ``gap_all_groups``: the same with the largest similarity across *all* groups. It is smaller, and positive
  only if every group can be distinguished from every other;
- ``correct``: whether the bipartition splits no group (Definition 1);
- ``gap_gradient``: g of the full gradients at the common model (Eq. 50);
- ``mean_norm``, ``max_norm``: ``||d_c||`` and ``max ||d_i||`` (Eq. 32, 33);
- ``gamma``: ``sqrt((1 - a_cross) / 2)``, which gamma_max must be below (Eq. 39).

``--control`` trains clients of one group, half of which have the classes 0-4 and half 5-9, and then clients
of two groups: in the first case both norms have to fall, in the second only ``||d_c||``.

``--cfl`` runs Algorithm 5 and prints every split and the final clusters.

DATA is an .npz with x_train (n, 28, 28) bytes and y_train.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

LAYERS = (784, 200, 10)
Array = NDArray[np.float64]


class Client(NamedTuple):
    x: Tensor
    y: Tensor
    group: int


def label_swap(x: Tensor, y: Tensor, clients: int, groups: int, samples: int, seed: int) -> list[Client]:
    """Clients with ``samples`` random samples each; group g swaps the g-th of disjoint pairs of labels."""
    random = np.random.default_rng([seed, 1])
    pairs = random.permutation(10)[: 2 * groups].reshape(groups, 2)
    chosen = random.permutation(len(y))[: clients * samples].reshape(clients, samples)
    federation = []
    for client in range(clients):
        group = client % groups
        a, b = pairs[group].tolist()
        labels = y[chosen[client]]
        swapped = torch.where(labels == a, b, torch.where(labels == b, a, labels))
        federation.append(Client(x[chosen[client]], swapped, group))
    return federation


def congruent(x: Tensor, y: Tensor, clients: int, samples: int, seed: int) -> list[Client]:
    """Clients that one model fits: half of them have the classes 0-4, the others 5-9; all are one group."""
    order = torch.from_numpy(np.random.default_rng([seed, 1]).permutation(len(y)))
    halves = [order[y[order] < 5], order[y[order] >= 5]]
    parts = [halves[c % 2][c // 2 * samples : (c // 2 + 1) * samples] for c in range(clients)]
    return [Client(x[part], y[part], 0) for part in parts]


def initial(seed: int) -> Tensor:
    """PyTorch's initial weights of the network, as a flat vector."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(LAYERS)]
    return torch.cat([p.detach().ravel() for layer in layers for p in layer.parameters()])


def logits(w: Tensor, x: Tensor) -> Tensor:
    start = 0
    for number, (a, b) in enumerate(itertools.pairwise(LAYERS)):
        weight, bias = w[start : start + a * b].view(b, a), w[start + a * b : start + a * b + b]
        start += a * b + b
        x = torch.addmm(bias, x, weight.T)
        if number < len(LAYERS) - 2:
            x = x.relu()
    return x


def gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    w = w.clone().requires_grad_(True)
    return torch.autograd.grad(cross_entropy(logits(w, x), y), w)[0]


def update(w: Tensor, client: Client, epochs: int, batch: int, lr: float, seed: Sequence[int]) -> Tensor:
    """``d_i``: the change of the weights by ``epochs`` of SGD (Eq. 1)."""
    random, trained = np.random.default_rng(seed), w.clone()
    for _ in range(epochs):
        order = torch.from_numpy(random.permutation(len(client.y)))
        for part in torch.split(order, batch):
            trained -= lr * gradient(trained, client.x[part], client.y[part])
    return trained - w


def cosines(rows: Tensor) -> Array:
    unit = rows.double() / rows.double().norm(dim=1, keepdim=True)
    return np.asarray((unit @ unit.T).numpy(), np.float64)


def bipartition(similarity: Array) -> tuple[list[int], list[int]]:
    """Algorithm 1 of the paper, as printed."""
    m = len(similarity)
    clusters = [{i} for i in range(m)]
    for flat in np.argsort(-similarity.ravel(), kind="stable"):
        pair = {int(flat) // m, int(flat) % m}
        merged = set().union(*(c for c in clusters if c & pair))
        clusters = [c for c in clusters if not c & pair] + [merged]
        if len(clusters) == 2:
            break
    first, second = sorted(sorted(c) for c in clusters)
    return first, second


def measure(similarity: Array, groups: NDArray[np.int64]) -> dict[str, float]:
    """The gaps, the criterion (39) and whether the bipartition is correct."""
    first, second = bipartition(similarity)
    cross = float(similarity[np.ix_(first, second)].max())
    same = groups[:, None] == groups[None, :]
    intra = float(np.where(same, similarity, np.inf).min())
    across = float(similarity[~same].max()) if not same.all() else np.nan
    return {
        "gap": intra - cross,
        "gap_all_groups": intra - across,
        "correct": float(not set(groups[first].tolist()) & set(groups[second].tolist())),
        "gamma": float(np.sqrt((1 - cross) / 2)),
    }


class Settings(NamedTuple):
    epochs: int = 3
    batch: int = 20
    lr: float = 0.05


def federated(
    federation: list[Client], w: Tensor, rounds: int, settings: Settings, seed: int, gradients: bool = False
) -> tuple[Tensor, pd.DataFrame, Tensor]:
    """FedAvg (Algorithm 2): the final model, one row per round, and the last round's updates ``(m, P)``."""
    groups = np.array([client.group for client in federation])
    n = torch.tensor([float(len(client.y)) for client in federation])
    rows = []
    for number in range(rounds):
        updates = torch.stack(
            [update(w, c, *settings, seed=(seed, 2, number, i)) for i, c in enumerate(federation)]
        )
        mean = (n / n.sum()) @ updates
        row = {"round": float(number + 1), "mean_norm": float(mean.double().norm())}
        row["max_norm"] = float(updates.double().norm(dim=1).max())
        row |= measure(cosines(updates), groups)
        if gradients:
            full = torch.stack([gradient(w, c.x, c.y) for c in federation])
            row["gap_gradient"] = measure(cosines(full), groups)["gap"]
        rows.append(row)
        w = w + mean
    return w, pd.DataFrame(rows), updates


def splits(federation: list[Client], rounds: int, settings: Settings, seed: int) -> pd.DataFrame:
    """FedAvg, bipartition, FedAvg in both halves and so on, until no cluster is mixed, and one split more.

    Returns one row per cluster at the end of its FedAvg: the value of each criterion, and whether the cluster
    *is* mixed.
    """
    waiting = [(tuple(range(len(federation))), initial(seed))]
    rows = []
    while waiting:
        members, start = waiting.pop(0)
        clients = [federation[i] for i in members]
        stationary, history, updates = federated(clients, start, rounds, settings, seed)
        groups = np.array([client.group for client in clients])
        first, second = bipartition(cosines(updates))
        last = history.iloc[-1]
        rows.append(
            {
                "members": len(members),
                "groups": len(set(groups.tolist())),
                "split": f"{sorted(set(groups[first].tolist()))} | {sorted(set(groups[second].tolist()))}",
                "correct": last["correct"],
                "gamma": last["gamma"],
                "mean_norm": last["mean_norm"],
                "max_norm": last["max_norm"],
            }
        )
        if len(set(groups.tolist())) > 1:
            waiting += [(tuple(members[i] for i in half), stationary) for half in (first, second)]
    return pd.DataFrame(rows)


def cfl(
    federation: list[Client],
    w: Tensor,
    rounds: int,
    settings: Settings,
    seed: int,
    eps1: float,
    eps2: float,
    gamma: float,
) -> tuple[list[tuple[int, ...]], pd.DataFrame]:
    """Algorithm 5: the final clusters, and one row per cluster and round."""
    clusters = [(tuple(range(len(federation))), w)]
    rows = []
    for number in range(rounds):
        following = []
        for members, model in clusters:
            updates = torch.stack(
                [update(model, federation[i], *settings, seed=(seed, 2, number, i)) for i in members]
            )
            n = torch.tensor([float(len(federation[i].y)) for i in members])
            mean = (n / n.sum()) @ updates
            mean_norm, max_norm = float(mean.double().norm()), float(updates.double().norm(dim=1).max())
            halves = [members]
            if mean_norm < eps1 and max_norm > eps2 and len(members) > 1:
                similarity = cosines(updates)
                first, second = bipartition(similarity)
                if gamma < np.sqrt((1 - similarity[np.ix_(first, second)].max()) / 2):
                    halves = [tuple(members[k] for k in half) for half in (first, second)]
            following += [(half, model + mean) for half in halves]
            true = [sorted({federation[i].group for i in half}) for half in halves]
            rows.append(
                {
                    "round": number + 1,
                    "members": len(members),
                    "mean_norm": mean_norm,
                    "max_norm": max_norm,
                    "split": " | ".join(map(str, true)) if len(halves) > 1 else "",
                }
            )
        clusters = following
    return [members for members, _ in clusters], pd.DataFrame(rows)


def read(path: Path) -> tuple[Tensor, Tensor]:
    with np.load(path) as data:
        x, y = data["x_train"], data["y_train"]
    return torch.from_numpy(x.reshape(len(x), -1).astype(np.float32) / 255), torch.from_numpy(y).long()


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    x, y = read(options.data)
    if options.cfl:
        for seed, samples in itertools.product(options.seeds, options.samples):
            federation = label_swap(x, y, options.clients, 4, samples, seed)
            clusters, table = cfl(federation, initial(seed), options.rounds, Settings(), seed, *options.cfl)
            table.to_csv(options.out / f"cfl-{samples}-{seed}.csv", index=False)
            print(f"seed {seed}, {samples} samples: clusters of the groups", end=" ")
            print([sorted(federation[i].group for i in members) for members in clusters])
            print(table[table["split"] != ""].round(3).to_string(index=False))
        return
    tables: dict[str, list[pd.DataFrame]] = {"rounds": [], "splits": []}
    for seed, samples in itertools.product(options.seeds, options.samples):
        if options.control:
            cases = {
                "congruent": congruent(x, y, options.clients, samples, seed),
                "incongruent": label_swap(x, y, options.clients, 2, samples, seed),
            }
        else:
            cases = {"label swap": label_swap(x, y, options.clients, 4, samples, seed)}
        for case, federation in cases.items():
            key = {"case": case, "seed": seed, "samples": samples}
            _, table, _ = federated(federation, initial(seed), options.rounds, Settings(), seed, True)
            tables["rounds"].append(table.assign(**key))
            if not options.control and samples >= 50:
                split_table = splits(federation, options.rounds, Settings(), seed)
                tables["splits"].append(split_table.assign(**key))
    name = "control" if options.control else "gap"
    rounds = pd.concat(tables["rounds"])
    rounds.to_csv(options.out / f"{name}.csv", index=False)
    marks = sorted({1, 5, 10, 20, 30, 50, options.rounds})
    shown = rounds[rounds["round"].isin(marks)].drop(columns="seed")
    print(shown.groupby(["case", "samples", "round"]).mean().round(3).to_string())
    if tables["splits"]:
        table = pd.concat(tables["splits"])
        table.to_csv(options.out / "splits.csv", index=False)
        print(table.to_string(index=False, float_format="%.3f"))


if __name__ == "__main__":
    OPTIONS = (
        frame.option("data", type=Path, help="an .npz with x_train and y_train"),
        frame.option("--samples", type=int, nargs="+", default=[10, 20, 50, 100, 200, 300]),
        frame.option("--clients", type=int, default=20),
        frame.option("--rounds", type=int, default=50),
        frame.option("--control", action="store_true", help="congruent clients, and two groups (Figure 7)"),
        frame.option("--cfl", type=float, nargs=3, metavar=("EPS1", "EPS2", "GAMMA_MAX")),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS, seeds="0-2", out="runs/gap"))
