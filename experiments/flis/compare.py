"""FLIS (DC) and (HC) beside PACFL, IFCA and others on the same clients (thesis Table 3.1).

Each method with the settings that the thesis gives it, one run a seed. ``finetuned``: every client trains its
final model on for 5 epochs before the test, as the thesis tests clients with the models that they have
trained::

    python experiments/flis/compare.py experiments/flis/fmnist.yaml --seeds 0 --out runs/flis
    python experiments/flis/compare.py experiments/flis/fmnist.yaml --methods pacfl,flis_hc rounds=200
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

import rayfl

METHODS: dict[str, tuple[str, ...]] = {
    "fedavg": ("algorithm=fedavg",),
    "solo": ("algorithm={name: solo, sampled: true}",),
    "ifca": ("algorithm={name: ifca, clusters: 2}",),
    "ifca, 10": ("algorithm={name: ifca, clusters: 10}",),
    "pacfl": ("algorithm=pacfl", "clustering={proximity: vector_angle_min, threshold: 6}"),
    "flis_dc": ("algorithm={name: flis_dc, beta: 0.5}",),
    "flis_hc": ("algorithm=flis_hc", "clustering.threshold=0.5"),
    "flis_hc, 0.75": ("algorithm=flis_hc", "clustering.threshold=0.25"),
    "flis_dc, noise": ("algorithm={name: flis_dc, beta: 0.5, server_data: {source: noise}}",),
    "flis_hc, noise": (
        "algorithm=flis_hc",
        "clustering={threshold: 0.5, signature: {name: predictions, data: {source: noise}}}",
    ),
}
COLUMNS = (
    "clusters",
    "accuracy_mean",
    "accuracy_worst10",
    "finetuned_accuracy_mean",
    "finetuned_accuracy_worst10",
    "bytes_up",
    "bytes_down",
    "seconds",
)


def main() -> None:
    """Run what is not there yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a preset or YAML file")
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by semicolons")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--out", type=Path, default=Path("runs/flis"))
    parser.add_argument("overrides", nargs="*", help="settings such as rounds=200")
    given = parser.parse_intermixed_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in given.seeds.split(","):
        for method in given.methods.split(";"):
            settings = [*METHODS[method], f"seed={seed}", f"output.root={given.out}"]
            settings += ["evaluation.finetune_epochs=5", *given.overrides]
            summary = rayfl.run(given.config, settings).summary
            rows.append({"method": method, "seed": int(seed), **{name: summary[name] for name in COLUMNS}})
            print(rows[-1], flush=True)
            pd.DataFrame(rows).to_csv(given.out / "runs.csv", index=False)
    means = pd.DataFrame(rows).groupby("method", sort=False)[list(COLUMNS)].mean()
    print(means.round(1).to_string())


if __name__ == "__main__":
    main()
