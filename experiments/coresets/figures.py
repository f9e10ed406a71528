"""SCGIGA and the methods that it is compared with: the figures of chapter 6, as CSV, Markdown and PNG.

::

    python experiments/coresets/figures.py mixture blocks bound trees facebook scale clients gcn \
        --data shared/data --seeds 0-19 --out runs/coresets

mixture   error of the mean against references, Gaussian mixture 20/30/50 %, n = 10,000 (Figure 6.2, left)
blocks    the same, stochastic block model 10/50/40 %, and the effect of l (Figure 6.2, middle and right)
bound     the bound of Theorem 6 in every step
trees     average distances on a power-law tree and a random graph (Figure 6.4)
facebook  average distances on the Facebook ego networks (Figure 6.4); needs --data
scale     seconds and memory at n = 100,000
clients   mean accuracy of 10,000 clients from 200
gcn       labels chosen for a graph convolutional network on Cora (Figure 6.1); needs --data
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array, eye_array
from scipy.sparse.csgraph import dijkstra
from torch import Tensor

from rayfl.coresets import betweenness, bounds, frank_wolfe, graphs, kmeans, scgiga, spectral, uniform, walks
from rayfl.coresets.base import Coreset, nearest_shares
from rayfl.coresets.clients import client_coreset, client_graph
from rayfl.coresets.graphs import Graph
from rayfl.random import generator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

Array = NDArray[np.float64]
Rows = list[dict[str, Any]]

KAPPA = 0.2
BLOCK_POWER = 32
RANDOM_DRAWS = 20
SOURCES = 200  # of the paths that betweenness counts


def costs_of(n: int, seed: int) -> Array:
    """The thesis' costs: fixed, uniform on [0, 1]."""
    return generator(seed, "costs").random(n)


def greedy(
    graph: Graph, X: walks.Vectors, counts: Sequence[int], seed: int, kappa: float = 1.0
) -> dict[int, scgiga.Step]:
    """Algorithm 12 for every number of references from one run: the last step with at most that many."""
    costs = costs_of(len(graph), seed)
    steps: dict[int, scgiga.Step] = {}
    for step in scgiga.steps(graph, max(counts), seed=seed, costs=costs, kappa=kappa, vectors=X):
        size = len(step.coreset)
        steps.update({k: step for k in counts if k >= size})
    return steps


def frank_wolfe_of(graph: Graph, X: walks.Vectors, counts: Sequence[int], seed: int) -> dict[int, Coreset]:
    """Frank-Wolfe for every number of references from one run, as :func:`greedy`."""
    coresets: dict[int, Coreset] = {}
    for coreset in frank_wolfe.steps(graph, max(counts), seed=seed, vectors=X):
        coresets.update({k: coreset for k in counts if k >= len(coreset)})
    return coresets


def choices(
    graph: Graph,
    counts: Sequence[int],
    powers: dict[int, int],
    seed: int,
    skip: set[str],
    vectors: Callable[[int], walks.Vectors] | None = None,
) -> Rows:
    """Every method's coresets: one row per method and number of references, with the coreset itself."""
    rows: Rows = []

    def add(method: str, k: int, coreset: Coreset, **more: Any) -> None:
        rows.append({"method": method, "references": k, "coreset": coreset, **more})

    costs = costs_of(len(graph), seed)
    for power in sorted(set(powers.values())):
        same_power = [k for k in counts if powers[k] == power]
        X = vectors(power) if vectors else walks.walk_vectors(graph, power, max(same_power), seed)
        for name, kappa in (("scgiga", 1.0), (f"scgiga kappa {KAPPA}", KAPPA)):
            for k, step in greedy(graph, X, same_power, seed, kappa).items():
                chosen = step.coreset
                cost = float(costs[chosen.ids].sum())
                residual = bounds.residual(graph, chosen, power)
                add(name, k, chosen.normalised(), cost=cost, power=power, residual=residual)
                if kappa == 1.0:
                    add("scgiga as printed", k, chosen, cost=cost, power=power, residual=residual)
        for k, selected in frank_wolfe_of(graph, X, same_power, seed).items():
            add("frank-wolfe", k, Coreset(selected.ids, nearest_shares(graph, selected.ids)))
            add("frank-wolfe own weights", k, selected)
    U = spectral.eigenvectors(graph, max(counts), seed) if "spectral" not in skip else None
    central = betweenness.centrality(graph, sources=min(len(graph), SOURCES), seed=seed)
    for k in counts:
        for draw in range(RANDOM_DRAWS):
            add("random", k, uniform.select(graph, k, seed=1000 * seed + draw))
        if "kmeans" not in skip:
            add("k-means", k, kmeans.select(graph, k, seed=seed))
        if U is not None:
            add("spectral", k, spectral.select(graph, k, seed=seed, embedding=U))
        ids = np.argsort(-central, kind="stable")[:k]
        add("betweenness", k, Coreset(ids, nearest_shares(graph, ids)))
    return rows


def mean_errors(graph: Graph, rows: Rows, seed: int) -> Rows:
    """The thesis' ``Err = |sum a_s f(s) - mean f|^2`` for f = indicator of the smallest group."""
    assert graph.groups is not None
    f = (graph.groups == np.bincount(graph.groups).argmin()).astype(float)
    result = []
    for row in rows:
        chosen = row.pop("coreset")
        result.append({**row, "seed": seed, "error": (chosen.estimate(f[chosen.ids]) - f.mean()) ** 2})
    return result


def mixture(options: argparse.Namespace) -> pd.DataFrame:
    counts, rows = (3, 5, 7, 10, 14, 20, 30, 60, 100), []
    for seed in options.seeds:
        graph = graphs.gaussian_mixture(options.n, seed)
        P = graphs.lazy_walk(graph)
        powers = {k: walks.covering_power(P, k, seed) for k in counts}
        pairs = walks.eigenpairs(P, 300, seed)  # once for all long walks

        def vectors(power: int, P: Any = P, pairs: Any = pairs) -> walks.Vectors:
            return pairs[1] * pairs[0] ** power if power >= 48 else graphs.walk_power(P, power)

        rows += mean_errors(graph, choices(graph, counts, powers, seed, set(), vectors), seed)
        keep("mixture", rows, options)
        print(f"mixture, seed {seed}", flush=True)
    return pd.DataFrame(rows)


def blocks(options: argparse.Namespace) -> pd.DataFrame:
    counts, rows = (3, 5, 10, 14, 20, 28, 40, 60, 100), []
    for seed in options.seeds:
        graph = graphs.block_model([200, 1000, 800], 0.05, 0.005, seed)
        chosen_rows = choices(graph, counts, dict.fromkeys(counts, BLOCK_POWER), seed, set())
        for power in (1, 2, 4, 8, 16, 32, 64):
            X = walks.walk_vectors(graph, power, max(counts), seed)
            for k, step in greedy(graph, X, counts, seed).items():
                chosen = step.coreset.normalised()
                residual = bounds.residual(graph, step.coreset, power)
                row = {"method": f"l = {power}", "references": k, "power": power, "residual": residual}
                chosen_rows.append({**row, "coreset": chosen})
        rows += mean_errors(graph, chosen_rows, seed)
        keep("blocks", rows, options)
        print(f"blocks, seed {seed}", flush=True)
    return pd.DataFrame(rows)


def bound(options: argparse.Namespace) -> pd.DataFrame:
    """Theorem 6 in every step of every run: for ``f = P^l g``, a smoothed indicator, and for J."""
    rows: Rows = []
    for seed in options.seeds:
        for name, graph in (
            ("mixture", graphs.gaussian_mixture(2000, seed)),
            ("blocks", graphs.block_model([200, 1000, 800], 0.05, 0.005, seed)),
        ):
            assert graph.groups is not None
            g = (graph.groups == np.bincount(graph.groups).argmin()).astype(float)
            walk, costs = graphs.lazy_walk(graph), costs_of(len(graph), seed)
            for power in (1, 4, 16):
                X, f = walks.walk_vectors(graph, power, 1), g
                for _ in range(power):
                    f = walk @ f
                for kappa in (1.0, KAPPA):
                    steps = [*scgiga.steps(graph, 20, seed=seed, vectors=X, costs=costs, kappa=kappa)]
                    eta2, second = (bounds.rate(X, kappa, k) for k in (1, 2))
                    grows = eta2 / second - 1.0  # the rate is eta^2 / (1 + grows (k - 1))
                    for k, step in enumerate(steps, 1):
                        chosen = step.coreset
                        error = abs(chosen.estimate(f[chosen.ids]) - f.mean())
                        promised = np.linalg.norm(g) * np.sqrt(step.J / len(graph))
                        rate = eta2 / (1.0 + grows * (k - 1))
                        held = error <= promised * (1 + 1e-9) and rate + 1e-9 >= step.J
                        rows.append({"graph": name, "power": power, "kappa": kappa, "held": held})
                        rows[-1] |= {"used": error / promised, "cut": step.cut}
    return pd.DataFrame(rows)


def distance_errors(graph: Graph, rows: Rows, seed: int, distances: Array | None = None) -> Rows:
    """Mean over vertices of ``|sum_s w_s d(v, s) - mean_u d(v, u)|`` in hops (section 6.6.3)."""
    D = dijkstra(graph.adjacency, unweighted=True) if distances is None else distances
    mean = D.mean(axis=0)
    result = []
    for row in rows:
        chosen = row.pop("coreset")
        result.append({**row, "seed": seed, "error": np.abs(chosen.weights @ D[chosen.ids] - mean).mean()})
    return result


def trees(options: argparse.Namespace) -> pd.DataFrame:
    counts, rows = (2, 5, 10, 20, 50), []
    for seed in options.seeds:
        for name, graph in (
            ("tree", graphs.preferential_tree(1000, seed)),
            ("random", graphs.random_graph(1000, 4.0, seed)),
        ):
            P = graphs.lazy_walk(graph)
            powers = {k: walks.covering_power(P, k, seed) for k in counts}
            method_rows = choices(graph, counts, powers, seed, {"kmeans", "spectral"})
            rows += [{**row, "graph": name} for row in distance_errors(graph, method_rows, seed)]
    return pd.DataFrame(rows)


def facebook(options: argparse.Namespace) -> pd.DataFrame:
    graph = graphs.ego_graph(options.data / "facebook" / "facebook_combined.txt.gz")
    D = dijkstra(graph.adjacency, unweighted=True)
    counts, rows = (2, 5, 10, 20, 50, 100), []
    P = graphs.lazy_walk(graph)
    for seed in options.seeds[:5]:  # only random, costs and ties depend on the seed
        powers = {k: walks.covering_power(P, k, seed) for k in counts}
        rows += distance_errors(graph, choices(graph, counts, powers, seed, {"kmeans"}), seed, D)
        keep("facebook", rows, options)
        print(f"facebook, seed {seed}, powers {powers}", flush=True)
    return pd.DataFrame(rows)


def scale(options: argparse.Namespace) -> pd.DataFrame:
    start_time = time.perf_counter()
    graph = graphs.gaussian_mixture(100_000, 0)
    built = time.perf_counter() - start_time
    assert graph.groups is not None
    f = (graph.groups == 0).astype(float)
    rows: Rows = []
    plans: list[tuple[int, walks.Power]] = [(200, 1), (1000, 1), (1000, 4), (1000, "auto")]
    for references, power in plans:
        start_time = time.perf_counter()
        chosen = scgiga.select(graph, references, power=power).normalised()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows.append(
            {
                "references": references,
                "power": power,
                "seconds": time.perf_counter() - start_time,
                "peak_gb": peak,
                "error": (chosen.estimate(f[chosen.ids]) - f.mean()) ** 2,
                "random": 0.16 / references,
                "graph_seconds": built,
            }
        )
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def clients(options: argparse.Namespace) -> pd.DataFrame:
    """10,000 clients with Dirichlet label histograms.

    A client's accuracy: the accuracy of a model on its classes (which differs by 25 points between easy and
    hard ones), plus a client effect of 3 points, plus the binomial noise of 50 test samples.
    """
    N, K, rows = 10_000, 200, []
    for seed in options.seeds:
        rng = generator(seed, "clients of the experiment")
        histograms = rng.dirichlet(np.full(10, 0.3), N)
        smooth = 100 * histograms @ rng.uniform(0.7, 0.95, 10)
        truth = np.clip(smooth / 100 + rng.normal(0, 0.03, N), 0, 1)
        accuracy = 100 * rng.binomial(50, truth) / 50
        start_time = time.perf_counter()
        graph = client_graph(histograms, seed=seed)
        chosen = client_coreset(graph, K, seed=seed)
        seconds = time.perf_counter() - start_time
        group = histograms.argmax(axis=1)
        grouped = client_coreset(client_graph(clusters=group, seed=seed), K, seed=seed)
        cluster = kmeans.select(graph, K, seed=seed)
        named = [
            ("scgiga, histograms", chosen),
            ("scgiga, clusters", grouped),
            ("k-means, histograms", cluster),
        ]
        named += [("random", uniform.select(graph, K, seed=1000 * seed + draw)) for draw in range(200)]
        for name, coreset in named:
            error = coreset.estimate(accuracy[coreset.ids]) - accuracy.mean()
            smooth_error = coreset.estimate(smooth[coreset.ids]) - smooth.mean()
            rows.append({"method": name, "seed": seed, "error": error, "smooth_error": smooth_error})
            rows[-1]["seconds"] = seconds if name == "scgiga, histograms" else np.nan
    return pd.DataFrame(rows)


class GCN(torch.nn.Module):
    """Kipf and Welling's two layers: ``A' ReLU(A' X W_0) W_1``, 16 hidden units, dropout 0.5."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(features, 16), torch.nn.Linear(16, classes)

    def forward(self, A: Tensor, X: Tensor) -> Tensor:
        hidden = torch.relu(torch.sparse.mm(A, self.first(torch.dropout(X, 0.5, self.training))))
        hidden = self.second(torch.dropout(hidden, 0.5, self.training))
        out: Tensor = torch.sparse.mm(A, hidden)
        return out


def gcn(options: argparse.Namespace) -> pd.DataFrame:
    data = np.load(options.data / "cora" / "cora.npz")
    n = int(data["x_shape"][0])
    y = torch.from_numpy(data["y"].astype(np.int64))
    indptr, indices = data["x_indptr"], data["x_indices"]
    bag: Array = (
        csr_array((np.ones(len(indices)), indices, indptr), shape=tuple(data["x_shape"]))
        .toarray()
        .astype(float)
    )
    X = torch.from_numpy((bag / np.maximum(bag.sum(axis=1, keepdims=True), 1)).astype(np.float32))
    a, b = data["edges"]
    plain = csr_array((np.ones(2 * len(a)), (np.r_[a, b], np.r_[b, a])), shape=(n, n)) + eye_array(n)
    root: Any = diags_array(np.asarray(1 / np.sqrt(plain.sum(axis=1))).ravel().astype(float))
    normalised = csr_array(root @ plain @ root)
    graph = Graph(normalised, components=True)
    coo = normalised.tocoo()
    A = torch.sparse_coo_tensor(
        torch.from_numpy(np.stack([coo.row, coo.col]).astype(np.int64)),
        torch.tensor(coo.data, dtype=torch.float32),
        (n, n),
    ).coalesce()
    validation, test = (torch.from_numpy(data[key].astype(np.int64)) for key in ("val_idx", "test_idx"))
    open_to_choice = np.ones(n, bool)
    open_to_choice[data["val_idx"]] = open_to_choice[data["test_idx"]] = False
    pool = np.flatnonzero(open_to_choice)
    central = betweenness.centrality(graph, sources=SOURCES)
    counts = (14, 35, 70, 140, 270)
    U = spectral.eigenvectors(graph, max(counts))
    rows: Rows = []
    vectors = {k: walks.walk_vectors(graph, "auto", k) for k in counts}
    for seed in options.seeds[:10]:
        for k in counts:
            greedy_steps = scgiga.steps(graph, k, seed=seed, vectors=vectors[k], eligible=open_to_choice)
            frank_wolfe_steps = frank_wolfe.steps(graph, k, seed=seed, vectors=vectors[k])
            chosen: dict[str, NDArray[np.int64]] = {
                "scgiga": deque(greedy_steps, maxlen=1).pop().coreset.ids,
                "random": generator(seed, "labels", k).choice(pool, k, replace=False),
                "betweenness": pool[np.argsort(-central[pool], kind="stable")][:k],
                "k-means": _k_means_within(graph, bag, pool, k, seed),
                "spectral": _k_means_within(graph, U[:, :k], pool, k, seed),
                "frank-wolfe": deque(frank_wolfe_steps, maxlen=1).pop().ids,
            }
            chosen["frank-wolfe"] = chosen["frank-wolfe"][open_to_choice[chosen["frank-wolfe"]]]
            for name, ids in chosen.items():
                accuracy = _train(A, X, y, torch.from_numpy(ids), validation, test, seed)
                rows.append({"method": name, "references": k, "seed": seed, "error": 100 * accuracy})
        keep("gcn", rows, options)
        print(f"gcn, seed {seed}", flush=True)
    return pd.DataFrame(rows)


def _k_means_within(
    graph: Graph, points: Array, pool: NDArray[np.int64], k: int, seed: int
) -> NDArray[np.int64]:
    """K-means of the points that may be chosen."""
    part = Graph(graph.adjacency[pool][:, pool], points[pool], components=True)
    return np.asarray(pool[kmeans.select(part, k, seed=seed).ids])


def _train(
    A: Tensor,
    X: Tensor,
    y: Tensor,
    labelled: Tensor,
    val: Tensor,
    test: Tensor,
    seed: int,
) -> float:
    """The thesis' training: Adam 0.01, at most 100 epochs, ended after 10 without a lower validation loss."""
    torch.manual_seed(seed)
    model = GCN(X.shape[1], int(y.max()) + 1)
    decayed: list[dict[str, Any]] = [{"params": model.first.parameters(), "weight_decay": 5e-4}]
    optimizer = torch.optim.Adam([*decayed, {"params": model.second.parameters()}], lr=0.01)
    best, best_accuracy, since = np.inf, 0.0, 0
    for _ in range(100):
        model.train()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(A, X)[labelled], y[labelled]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        model.eval()
        with torch.no_grad():
            out = model(A, X)
        loss = float(torch.nn.functional.cross_entropy(out[val], y[val]))
        since = 0 if loss < best else since + 1
        if loss < best:
            best, best_accuracy = loss, float((out[test].argmax(1) == y[test]).double().mean())
        if since == 10:
            break
    return best_accuracy


PARTS: dict[str, Callable[[argparse.Namespace], pd.DataFrame]] = {
    f.__name__: f for f in (mixture, blocks, bound, trees, facebook, scale, clients, gcn)
}


def table(rows: pd.DataFrame) -> str:
    """Mean error (and its standard error) of each method and number of references, as Markdown."""
    seeds = rows.groupby(["method", "references", "seed"], sort=False)["error"].mean()  # over random draws
    cells = seeds.groupby(["method", "references"], sort=False).agg(["mean", "sem"])
    text = cells.apply(lambda cell: f"{cell['mean']:.3g} ± {cell['sem']:.1g}", axis=1).unstack("references")
    text = text[sorted(text.columns)]
    lines = [["method", *map(str, text.columns)], ["---", *["--:"] * len(text.columns)]]
    lines += [[str(name), *row] for name, row in zip(text.index, text.to_numpy(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def figure(rows: pd.DataFrame, title: str, path: Path, what: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axis = plt.subplots(figsize=(6, 4), dpi=100)
    for method, part in rows.groupby("method", sort=False):
        mean = part.groupby("references")["error"].mean()
        axis.plot(mean.index, mean, marker=".", label=str(method), lw=2 if method == "scgiga" else 1)
    axis.set(xlabel="references", ylabel=what, title=title, xscale="log")
    if "accuracy" not in what:
        axis.set_yscale("log")
    axis.legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(path)
    plt.close(fig)


def keep(name: str, rows: Rows, options: argparse.Namespace) -> None:
    """Write the results after each seed, so that ``--again`` can show them after an interruption."""
    pd.DataFrame(rows).to_csv(options.out / f"{name}.csv", index=False)


def report(name: str, rows: pd.DataFrame, out: Path) -> None:
    rows.to_csv(out / f"{name}.csv", index=False)
    if name == "scale":
        print(rows.to_string())
        return
    if name == "bound":
        print(f"held in {rows['held'].sum()} of {len(rows)} steps; {rows['cut'].sum()} were cut")
        print(rows.groupby(["graph", "power", "kappa"])["used"].max())
        return
    if name == "clients":
        errors = rows.groupby("method", sort=False)[["error", "smooth_error"]]
        print("rmse\n", errors.apply(lambda e: (e**2).mean() ** 0.5), "\nbias\n", errors.mean())
        print("seconds", rows["seconds"].max())
        return
    what = {"gcn": "test accuracy (%)", "mixture": "squared error", "blocks": "squared error"}.get(
        name, "hops"
    )
    parts = rows.groupby("graph", sort=False) if "graph" in rows else [(name, rows)]
    for part, part_rows in parts:
        print(f"\n{part}\n{table(part_rows)}")
        (out / f"{part}.md").write_text(table(part_rows))
        figure(part_rows, str(part), out / f"{part}.png", what)
    if "cost" in rows:
        print(
            rows.groupby(["method", "references"], sort=False)["cost"].mean().dropna().unstack("references")
        )


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for part in options.parts:
        path = options.out / f"{part}.csv"
        rows = pd.read_csv(path) if options.again else PARTS[part](options)
        report(part, rows, options.out)


if __name__ == "__main__":
    OPTIONS = (
        frame.option("parts", nargs="+", choices=PARTS),
        frame.option("--data", type=Path, default=Path("data"), help="folder with facebook/ and cora/"),
        frame.option("--again", action="store_true", help="only tables and figures, from --out"),
        frame.option("--n", type=int, default=10_000, help="points of the mixture"),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS, seeds="0-19", out="runs/coresets"))
