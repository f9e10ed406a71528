"""Thesis Table 5.2: FedAvg on CIFAR-10 under IID, C-NIID (2) and SC-NIID (2), over seeds.

::

    python experiments/heterogeneity/table_5_2.py --seeds 0-2 --out runs/table-5-2 [settings, e.g. rounds=20]

Every client tests the common model on the test samples of its own labels. Beside the accuracy after the last
round stands the mean over the last five tests, since FedAvg's accuracy swings from round to round where
clients have two labels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from rayfl import api
from rayfl.config import load
from rayfl.errors import RayflError

HERE = Path(__file__).parent
PARTITIONS = {
    "IID": ["partition.name=iid"],
    "C-NIID (2)": ["partition.name=label_skew", "partition.rho=0.2"],
    "SC-NIID (2)": ["partition.name=sc_niid", "partition.n_super_clusters=2"],
}
PRINTED = {"IID": 88.15, "C-NIID (2)": 83.63, "SC-NIID (2)": 75.53}
LAST = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="settings such as rounds=20")
    parser.add_argument("--seeds", default="0-2", help="first-last")
    parser.add_argument("--out", type=Path, default=Path("runs/table-5-2"))
    options = parser.parse_intermixed_args(arguments)
    first, _, last = options.seeds.partition("-")
    rows = []
    try:
        for seed in range(int(first), int(last or first) + 1):
            for name, partition in PARTITIONS.items():
                settings = [f"seed={seed}", "execution.backend=inline", "output.report=false"]
                settings += [f"output.root={options.out}", *partition, *options.overrides]
                result = api.run(load(HERE / "fedavg-cifar10.yaml", settings))
                tested = result.rounds["accuracy_mean"].dropna()
                rows.append((name, seed, tested.iloc[-1], tested.iloc[-LAST:].mean()))
                print(f"{name}, seed {seed}: last {rows[-1][2]:.1f} %, last {LAST} tests {rows[-1][3]:.1f} %")
    except RayflError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    runs = pd.DataFrame(rows, columns=["partition", "seed", "last", "mean of the last tests"])
    runs.to_csv(options.out / "runs.csv", index=False)
    table = runs.groupby("partition", sort=False)[["last", "mean of the last tests"]].agg(["mean", "std"])
    table["thesis"] = pd.Series(PRINTED)
    print(table.round(1).to_string())
    return 0


if __name__ == "__main__":
    sys.exit(main())
