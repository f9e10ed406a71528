"""Clients whose data change in mid-run, with and without reclustering.

::

    python experiments/clustered/drift.py --seeds 0-2 --out runs/drift

Five groups of 20 clients with two classes each (FLT's scenario 1, Fashion-MNIST). After half of the rounds
a fifth of the clients get samples of another group. ``--out`` gets ``drift.csv`` (a row a seed and method;
what is there is not run again) and ``drift.md``: accuracy at the end of the clients that changed and of the
others, and of all at the first test after the change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from rayfl import api
from rayfl.config import Config, load, variant
from rayfl.errors import ConfigError, RayflError, nearest
from rayfl.servers import building

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from compare_seeds import seeds_of

ROUNDS, CHANGE = 40, 20
COMMON = (
    f"rounds={ROUNDS}",
    f"events=[{{name: drift, round: {CHANGE}, fraction: 0.2, kind: group, reuse: true}}]",
    "data.server_share=2500",  # FLIS looks at so many that no client has: all methods share the rest
    "training.epochs=2",
    "evaluation.every=2",
    "execution.backend=inline",
    "output.report=false",
)
FLAGS = ("clustering.max_flags=0",)
"""The clustering is made anew as soon as a client has raised a flag."""
EVERY = ("clustering.every=10",)
CASE_II = "algorithm.train_on=clusters"
GIVEN = ("clustering.n_clusters=5",)
METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "SOLO": ("solo", ("algorithm.sampled=true",)),
    "FedAvg": ("fedavg", ()),
    "PACFL": ("pacfl", GIVEN),
    "PACFL, flags": ("pacfl", (*GIVEN, *FLAGS)),
    "FLIS (HC)": ("flis_hc", GIVEN),
    "FLIS (HC), flags": ("flis_hc", (*GIVEN, *FLAGS)),
    "FLT": ("flt", (*GIVEN, CASE_II)),
    "FLT, flags": ("flt", (*GIVEN, CASE_II, *FLAGS)),
    "FLT, every 10 rounds": ("flt", (*GIVEN, CASE_II, *EVERY)),
    "IFCA": ("ifca", ("algorithm.clusters=5",)),
    "FedSEM": ("fedsem", ("algorithm.clusters=5",)),
}
"""Algorithm and settings by the row's name."""


def measure(name: str, config: Config) -> dict[str, object]:
    """A run, and how those that changed fare."""
    (_, after), _ = building.build(config)
    result = api.run(config)
    last = result.clients.set_index("client")["accuracy_last"]
    tested = result.rounds.dropna(subset="accuracy_mean").set_index("round")["accuracy_mean"]
    changed = np.isin(last.index, after.drifted)
    return {
        "method": name,
        "seed": config.seed,
        "before": tested[tested.index < CHANGE].iloc[-1],
        "after": tested[tested.index >= CHANGE].iloc[0],
        "changed": last[changed].mean(),
        "others": last[~changed].mean(),
        "ari": result.summary["ari"],
    }


def table(rows: pd.DataFrame) -> str:
    """Markdown: mean and standard deviation over the seeds."""
    titles = {
        "before": "all, last test before",
        "after": "all, first test after",
        "changed": "changed clients, end",
        "others": "other clients, end",
    }
    lines = [f"| | {' | '.join(titles.values())} | ARI, end |", "| --- |" + " --: |" * (len(titles) + 1)]
    for method, own in rows.groupby("method", sort=False):
        cells = [f"{own[c].mean():.1f} ± {own[c].std(ddof=1):.1f}" for c in titles]
        ari = "–" if own["ari"].isna().all() else f"{own['ari'].min():.2f} to {own['ari'].max():.2f}"
        lines.append(f"| {method} | {' | '.join([*cells, ari])} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="settings of every run such as training.lr=0.05")
    parser.add_argument("--config", default="flt-scenario1", help="a preset or a YAML file with groups")
    parser.add_argument("--methods", default="", help="rows, separated by semicolons; all if empty")
    parser.add_argument("--seeds", default="0-2", help="such as 0-5 or 0,3,7 (default: 0-2)")
    parser.add_argument("--out", type=Path, default=Path("runs/drift"), help="folder of the results")
    options = parser.parse_intermixed_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "drift.csv"
    try:
        methods = [m.strip() for m in options.methods.split(";")] if options.methods else list(METHODS)
        for method in methods:
            if method not in METHODS:
                raise ConfigError("--methods", f"no row {method!r}", nearest(method, METHODS))
        for seed in seeds_of(options.seeds):
            common = [*COMMON, f"seed={seed}", f"output.root={options.out}", *options.overrides]
            for method in methods:
                done = pd.read_csv(file) if file.exists() else pd.DataFrame({"method": [], "seed": []})
                if ((done["method"] == method) & (done["seed"] == seed)).any():
                    continue
                algorithm, own = METHODS[method]
                row = measure(method, load(variant(options.config, common, algorithm), own))
                print(row, flush=True)
                pd.DataFrame([row]).to_csv(file, mode="a", header=not file.exists(), index=False)
    except RayflError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = table(pd.read_csv(file))
    (options.out / "drift.md").write_text(text)
    print(f"\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
