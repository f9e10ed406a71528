"""The separation gap in a run of rayfl and in the plain loop of gap.py, on the same clients.

::

    python experiments/cfl/beside.py

``rayfl run cfl-label-swap`` with ``algorithm.gap=true`` and no splits (``eps1: 0``), for several numbers of
samples per client; then ``gap.federated`` on the same samples, from the same initial weights. Only the order
of the samples differs. For both it reports the gap, ``|d_c|``, ``max |d_i|`` and whether the bipartition is
correct. It writes ``beside.csv``, one row per round and seed, and prints the mean over the seeds for some
rounds.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import gap
import numpy as np
import pandas as pd
import torch

import rayfl
from rayfl.config import Config, load
from rayfl.servers.building import build
from rayfl.training.batches import Batches

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import frame

COLUMNS = ["gap", "mean_norm", "max_norm", "correct"]


def config_of(samples: int, seed: int, rounds: int, out: Path) -> Config:
    """The preset without splits."""
    return load(
        "cfl-label-swap",
        [
            "algorithm={name: cfl, gap: true, criteria: {eps1: 0}}",
            f"partition.samples={samples}",
            f"seed={seed}",
            f"rounds={rounds}",
            f"evaluation.every={rounds}",
            "execution.backend=inline",
            f"output.root={out}",
            "output.report=false",
            "output.tensorboard=false",
        ],
    )


def package(config: Config) -> pd.DataFrame:
    """The run's diagnostics of every round."""
    table = pd.read_csv(rayfl.run(config).path / "diagnostics.csv")
    return table.assign(round=table["round"] + 1, correct=table["correct"].astype(float))


def oracle(config: Config) -> pd.DataFrame:
    """The plain loop's diagnostics for the same clients, from the same weights."""
    stages, host = build(config)
    federation = stages[0].federation
    batches = Batches(federation.samples, torch.device("cpu"))
    assert federation.groups is not None
    clients = []
    for ids, group in zip(federation.train, federation.groups.tolist(), strict=True):
        x, y = batches.train(ids)
        clients.append(gap.Client(x.reshape(len(x), -1), y.long(), group))
    settings = gap.Settings(config.training.epochs, config.training.batch_size, config.training.lr)
    start = torch.from_numpy(np.array(host.spec.initial()))
    return gap.federated(clients, start, config.rounds, settings, config.seed)[1]


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    tables = []
    for samples, seed in itertools.product(options.samples, options.seeds):
        config = config_of(samples, seed, options.rounds, options.out)
        merged = package(config).merge(oracle(config), on="round", suffixes=("", " (loop)"))
        columns = [name + suffix for name in COLUMNS for suffix in ("", " (loop)")]
        tables.append(merged[["round", *columns]].assign(samples=samples, seed=seed))
        pd.concat(tables).to_csv(options.out / "beside.csv", index=False)
    everything = pd.concat(tables).drop(columns="seed")
    shown = everything[everything["round"].isin([1, 5, 10, 20, options.rounds])]
    print(shown.groupby(["samples", "round"]).mean().round(2).to_string())


if __name__ == "__main__":
    OPTIONS = (
        frame.option("--samples", type=int, nargs="+", default=[20, 50, 100, 300]),
        frame.option("--rounds", type=int, default=30),
    )
    sys.exit(frame.main(__doc__, work, *OPTIONS, seeds="0-2", out="runs/beside"))
