"""Thesis, Tables 4.1 and 4.3 on CIFAR-10: accuracy, what is pruned, bytes, parameters and operations.

::

    python experiments/subfedavg/table_4_1.py --out runs/subfedavg
    python experiments/subfedavg/table_4_1.py --out runs/subfedavg --clients 20 rounds=24 ...

Every row is one run of the preset ``subfedavg-cifar10``. ``finetuned``: FedAvg's model trained on by each
client for the epochs of a round before its test; ``server``: Sub-FedAvg's server's model under the client's
mask, not trained on. MTL's pull is the strongest of 1, 0.1, 0.01, 0.001 that did no harm in the small table.
With fewer than 100 clients the data are the first images of each class, 500 for every client, so that a shard
is 250 images of one class as in the whole. A run that is there already, finished, with the same config, is
not run again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from export import Network, networks

from rayfl import api
from rayfl.config import Config, load, resolve, with_overrides
from rayfl.errors import RayflError
from rayfl.rundir import RunDirectory
from rayfl.servers import building

PRESET = "subfedavg-cifar10"
UN, HY = "Sub-FedAvg (Un) {}", "Sub-FedAvg (Hy) {}"

ROWS: dict[str, list[str]] = {
    "Standalone": ["algorithm=solo", "algorithm.sampled=true"],
    "FedAvg": ["algorithm=fedavg", "evaluation.finetune_epochs=5"],
    "MTL": ["algorithm=mtl", "local.strength=0.01"],
    "LG-FedAvg": ["algorithm=lg_fedavg"],
    **{UN.format(p): [f"local.target={p / 100}"] for p in (30, 50, 70)},
    **{
        HY.format(p): ["local.pruning=hybrid", f"local.target={p / 100}", f"local.channel_target={p / 100}"]
        for p in (50, 70, 90)
    },
}
"""The rows of the table, and what each changes in the preset (``local.*`` is of Sub-FedAvg's alone)."""


def subset(config: Config, clients: int, folder: Path) -> Path:
    """The first ``500 clients / classes`` training images of each class, and all test images, as a file."""
    path = folder / f"{config.data.name}-{clients}.npz"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        samples = config.data.load(building.data_root(config))
        each = 500 * clients // samples.classes
        first = [np.flatnonzero(samples.y_train == label)[:each] for label in range(samples.classes)]
        at = np.sort(np.concatenate(first))
        np.savez(
            path,
            x_train=samples.x_train[at],
            y_train=samples.y_train[at],
            x_test=samples.x_test,
            y_test=samples.y_test,
        )
    return path


def config_of(changes: list[str], overrides: list[str], clients: int, out: Path) -> Config:
    """The config of a row."""
    common = [f"partition.clients={clients}", *overrides]
    if clients != load(PRESET).partition.clients:
        common.append(f"data={{name: npz, path: {subset(load(PRESET), clients, out)}}}")
    settings: dict[str, Any] = load(PRESET, common).to_dict()
    if any(change.startswith("algorithm=") for change in changes):
        settings.pop("local")
    return resolve(with_overrides(settings, changes))


def finished(config: Config, folder: Path) -> Path | None:
    """A finished run of the same config (the engine that it chose aside), if there is one."""
    for path in sorted(folder.glob("*/summary.json")):
        there = RunDirectory(path.parent).config
        training = config.training.model_copy(update={"engine": there.training.engine})
        if there == config.model_copy(update={"training": training}):
            return path.parent
    return None


def row_of(label: str, path: Path) -> dict[str, Any]:
    """The numbers of a finished run; means over clients that took part."""
    run = api.Result(path)
    summary = run.summary
    found: list[Network] = list(networks(path)) if "pruned_weights_mean" in summary else []

    def mean(values: list[float]) -> float | None:
        return float(np.mean(values)) if values else None

    return {
        "algorithm": label,
        "accuracy": summary["accuracy_mean"],
        "worst10": summary["accuracy_worst10"],
        "finetuned": summary.get("finetuned_accuracy_mean"),
        "server": mean([n.server_accuracy for n in found]),
        "channels_pruned": summary.get("pruned_channels_mean"),
        "weights_pruned": summary.get("pruned_weights_mean"),
        "megabytes": (summary["bytes_up"] + summary["bytes_down"]) / 1e6,
        "parameters": mean([n.parameters for n in found]),
        "nonzero": mean([n.nonzero for n in found]),
        "conv_flops": mean([n.flops for n in found]),
        "seconds": summary["seconds"],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, write ``table.csv``, and print it."""
    parser = argparse.ArgumentParser(description="thesis, Table 4.1: Sub-FedAvg on CIFAR-10")
    parser.add_argument("overrides", nargs="*", help="settings for all rows, such as rounds=24")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated labels of rows")
    given = parser.parse_args(arguments)
    out, rows = given.out.resolve(), []
    try:
        for label in given.rows.split(","):
            overrides = [*given.overrides, f"output.root={out / 'runs'}"]
            config = config_of(ROWS[label], overrides, given.clients, out)
            path = finished(config, out / "runs") or api.run(config).path
            rows.append(row_of(label, path))
            print(rows[-1], flush=True)
    except RayflError as error:
        print(error, file=sys.stderr)
        return 2
    table = pd.DataFrame(rows)
    table.to_csv(out / "table.csv", index=False)
    print(table.round(2).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
