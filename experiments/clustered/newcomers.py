"""Clients that join after the end of a run (thesis, Table 3.12): 80 of 100 clients train, the other 20 join
later.

::

    python experiments/clustered/newcomers.py --seeds 0-2 --out runs/newcomers
    python experiments/clustered/newcomers.py --methods pacfl,fedavg rounds=50 training.epochs=10

The partition is that of the config with all 100 clients (Fashion-MNIST, label skew 20 %). Newcomers get the
model that the method assigns to them and fine-tune it for 5 epochs. SOLO is listed twice: with 5 epochs, and
with as many as a client trains that takes part in every round. ``--out`` gets ``newcomers.csv`` (one row per
seed and method; existing rows are not computed again) and ``newcomers.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rayfl import api
from rayfl.commands.newcomers import assign_newcomers
from rayfl.config import Config, load, variant
from rayfl.data import Federation, write_npz
from rayfl.errors import ConfigError, nearest
from rayfl.servers import building

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

KNOWN, EPOCHS = 80, 5
METHODS: Mapping[str, tuple[str, ...]] = {
    "solo": ("algorithm.sampled=true",),
    "fedavg": (),
    "fedprox": ("local.mu=0.01",),
    "fednova": (),
    "scaffold": (),
    "lg_fedavg": ("algorithm.local_layers=3",),
    "per_fedavg": ("algorithm.alpha=0.01", "algorithm.beta=0.001"),
    "fedsem": ("algorithm.clusters=10",),
    "ifca": ("algorithm.clusters=10",),
    "cfl": ("algorithm.criteria.eps1=0.4", "algorithm.criteria.eps2=1.6"),
    "flis_hc": ("clustering.n_clusters=20",),
    "pacfl": (),
}
"""The methods, with their settings."""
COMMON = ("rounds=30", "training.epochs=2", "evaluation.every=30", "execution.backend=inline")


def split(config: Config, folder: Path) -> tuple[Path, Path]:
    """Write the known clients' samples as one dataset, and the newcomers' for :func:`assign_newcomers`."""
    (stage, *_), _ = building.build(config)
    federation, folder = stage.federation, folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    known, new = folder / f"known-{config.seed}.npz", folder / f"new-{config.seed}.npz"
    clients = np.arange(federation.clients)
    part = _samples(federation, clients[:KNOWN])
    own: dict[str, Any] = {name.replace("client", "domain"): array for name, array in part.items()}
    write_npz(known, replace(federation.samples, **own))
    np.savez(new, allow_pickle=False, **_samples(federation, clients[KNOWN:]))
    return known, new


def _samples(federation: Federation, clients: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The samples of some clients, client by client, and the number (from 0) of each sample's client."""
    found: dict[str, Any] = {}
    for part, lists in (("train", federation.train), ("test", federation.test)):
        ids = [lists[client] for client in clients.tolist()]
        together = np.concatenate(ids)
        for name in ("x", "y"):
            found[f"{name}_{part}"] = getattr(federation.samples, f"{name}_{part}")[together]
        found[f"client_{part}"] = np.repeat(np.arange(len(ids)), [len(i) for i in ids])
    return found


def measure(
    name: str, settings: Sequence[str], method: str, known: Path, new: Path
) -> list[dict[str, object]]:
    """Run a config without the newcomers, then assign and test the newcomers."""
    data = [
        # The server's data for FLIS, held out for all methods
        f"data={{name: npz, path: {known}, server_share: 2500}}",
        f"partition={{name: natural, clients: {KNOWN}}}",
    ]
    config = load(variant(name, [*settings, *data], method), METHODS[method])
    result = api.run(config)
    rows = []
    longest = config.rounds * config.training.epochs
    for epochs in (EPOCHS, longest) if method == "solo" else (EPOCHS,):
        frame = assign_newcomers(result.path, new, epochs, local_epochs=0)
        rows.append(
            {
                "method": method if epochs == EPOCHS else f"{method}, {epochs} epochs",
                "seed": config.seed,
                "members": result.summary["accuracy_mean"],
                "given": frame["accuracy"].mean(),
                "finetuned": frame["accuracy_finetuned"].mean(),
                "worst": frame["accuracy_finetuned"].min(),
                "clusters": result.summary["clusters"],
                "own_cluster": int(frame["new_cluster"].sum()),
            }
        )
    return rows


def table(rows: pd.DataFrame) -> str:
    """Markdown: mean and standard deviation over the seeds."""
    titles = {
        "members": "the 80 clients",
        "given": "newcomers, as given",
        "finetuned": "newcomers, fine-tuned",
        "worst": "the worst newcomer",
        "clusters": "clusters",
        "own_cluster": "newcomers with a cluster of their own",
    }
    lines = [f"| | {' | '.join(titles.values())} |", "| --- |" + " --: |" * len(titles)]
    for method, own in rows.groupby("method", sort=False):
        cells = [f"{own[c].mean():.1f} ± {own[c].std(ddof=1):.1f}" for c in titles]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def work(options: argparse.Namespace) -> None:
    """Run what is missing and write the table."""
    file = options.out / "newcomers.csv"
    methods = options.methods.split(",") if options.methods else list(METHODS)
    for method in methods:
        if method not in METHODS:
            raise ConfigError("--methods", f"no method {method!r}", nearest(method, METHODS))
    for seed in options.seeds:
        common = [*COMMON, f"seed={seed}", f"output.root={options.out}", "output.report=false"]
        settings, files = [*common, *options.overrides], None
        for method in methods:
            done = pd.read_csv(file) if file.exists() else pd.DataFrame({"method": [], "seed": []})
            if ((done["method"] == method) & (done["seed"] == seed)).any():
                continue
            files = files or split(load(options.config, settings), options.out)
            found = pd.DataFrame(measure(options.config, settings, method, *files))
            print(found.to_string(index=False), flush=True)
            found.to_csv(file, mode="a", header=not file.exists(), index=False)
    text = table(pd.read_csv(file))
    (options.out / "newcomers.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    OPTIONS = (
        frame.option("--config", default="pacfl-fmnist", help="a preset or a YAML file of 100 clients"),
        frame.option("--methods", default="", help="names, separated by commas; all if empty"),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS, seeds="0-2", out="runs/newcomers", overrides=True))
