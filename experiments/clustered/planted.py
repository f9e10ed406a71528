"""Which methods find planted clusters where: adjusted Rand indices, method by scenario.

::

    python experiments/clustered/planted.py experiments/clustered/planted.yaml --out runs/planted

``--scenarios "letters, 240 clients"`` and ``--methods "PACFL; IFCA"`` make a part of it. One-shot methods
cluster before any training, once with the true number of clusters and once with the number that their tree
(or graph) proposes. Iterative methods train for the scenario's rounds with the true number of models, CFL
with its criteria. ``--out`` gets ``planted.csv``, to which every run adds and which it does not repeat, and
``planted.md``.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from rayfl import api
from rayfl.algorithms import OneShotClustered
from rayfl.commands.cluster import cluster_without_training
from rayfl.config import Config, load, variant
from rayfl.errors import ConfigError, RayflError

FIELDS = ("scenario", "method", "seed", "asked", "clusters", "ari", "accuracy", "seconds", "refused")
GIVEN, PROPOSED, TRAINED = "given", "proposed", "trained"


def configs(
    scenario: dict[str, Any], method: dict[str, Any], label: str, common: Sequence[str]
) -> Iterator[tuple[str, Config]]:
    """What is to be run: how the number of clusters is decided, and the config."""
    shared = [*scenario.get("settings", ()), *common]
    own = [setting.format(C=scenario["clusters"]) for setting in method.get("settings", ())]
    own += scenario.get("methods", {}).get(label, ())
    base = variant(scenario["config"], shared, method["algorithm"])
    if isinstance(base.algorithm, OneShotClustered):
        count = f"clustering.n_clusters={scenario['clusters']}"
        yield GIVEN, load(base, [*own, "clustering.threshold=null", count])
        yield PROPOSED, load(base, [*own, "clustering.threshold=null", "clustering.n_clusters=null"])
    elif "rounds" in scenario:
        rounds = [f"rounds={scenario['rounds']}", f"evaluation.every={scenario['rounds']}"]
        yield TRAINED, load(base, [*rounds, *own])


def measure(asked: str, config: Config) -> dict[str, Any]:
    """Clusters, ARI and, of a training, accuracy."""
    begun = time.perf_counter()
    try:
        if asked == TRAINED:
            found = api.run(config).summary
            row = {name: found[name] for name in ("clusters", "ari")}
            row["accuracy"] = found["accuracy_mean"]
        else:
            (alone,), _ = cluster_without_training([config])
            row = {"clusters": alone.clusters.n_clusters, "ari": alone.clusters.ari}
    except RayflError as error:
        row = {"refused": str(error)}
    return {**row, "seconds": round(time.perf_counter() - begun, 1)}


def table(rows: pd.DataFrame) -> str:
    """Markdown: a line a method, two columns a scenario."""
    scenarios = list(dict.fromkeys(rows["scenario"]))
    lines = [["", *(f"{s}{how}" for s in scenarios for how in (", C given", ", proposed"))]]
    lines.append(["---"] + ["--:"] * (len(lines[0]) - 1))
    for method in dict.fromkeys(rows["method"]):
        cells = [method]
        for scenario in scenarios:
            here = rows[(rows["method"] == method) & (rows["scenario"] == scenario)]
            known = here[here["asked"].isin((GIVEN, TRAINED))]
            cells.append(_spread(known["ari"]) + _counts(known[known["asked"] == TRAINED]))
            proposed = here[here["asked"] == PROPOSED]
            cells.append(_spread(proposed["ari"]) + _counts(proposed))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _spread(values: pd.Series[float]) -> str:
    values = values.dropna()
    if values.empty:
        return "–"
    low, high = f"{values.min():.2f}", f"{values.max():.2f}"
    return low if low == high else f"{low} to {high}"


def _counts(rows: pd.DataFrame) -> str:
    counts = sorted({int(count) for count in rows["clusters"].dropna()})
    return f" ({', '.join(map(str, counts))})" if counts else ""


def chosen(text: str, names: Sequence[str], where: str) -> list[str]:
    """The names in a list separated by semicolons; all if it is empty."""
    wanted = [name.strip() for name in text.split(";") if name.strip()]
    for name in wanted:
        if name not in names:
            raise ConfigError(where, f"no {name!r}", f"valid: {'; '.join(names)}")
    return wanted or list(names)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path, help="planted.yaml")
    parser.add_argument("overrides", nargs="*", help="settings such as execution.backend=inline")
    parser.add_argument("--scenarios", default="", help="names, separated by semicolons; all if empty")
    parser.add_argument("--methods", default="", help="likewise")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from 0")
    parser.add_argument("--out", type=Path, default=Path("runs/planted"), help="folder of the results")
    options = parser.parse_intermixed_args(arguments)
    plan = yaml.safe_load(options.plan.read_text(encoding="utf-8"))
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "planted.csv"
    if not file.exists():
        file.write_text(",".join(FIELDS) + "\n")
    done = pd.read_csv(file)
    seen = set(zip(done["scenario"], done["method"], done["seed"], done["asked"], strict=True))
    try:
        for name in chosen(options.scenarios, list(plan["scenarios"]), "--scenarios"):
            scenario = plan["scenarios"][name]
            for label in chosen(options.methods, list(plan["methods"]), "--methods"):
                for seed in range(options.seeds):
                    common = [f"seed={seed}", f"output.root={options.out}", "output.report=false"]
                    common += options.overrides
                    jobs = configs(scenario, plan["methods"][label], label, common)
                    for asked, config in jobs:
                        if (name, label, seed, asked) in seen:
                            continue
                        row = {"scenario": name, "method": label, "seed": seed, "asked": asked}
                        row |= measure(asked, config)
                        print(row, flush=True)
                        with file.open("a", newline="") as opened:
                            csv.DictWriter(opened, FIELDS).writerow(row)
    except RayflError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = pd.read_csv(file)
    (options.out / "planted.md").write_text(table(rows))
    print(f"\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
