"""Several algorithms, each with several seeds: mean and spread of the final numbers, as a table.

::

    python experiments/compare_seeds.py mthfl-fmnist --algorithms mt_hfl,random_clustering --seeds 0-5
    python experiments/compare_seeds.py pacfl-fmnist --algorithms pacfl,fedavg,solo --seeds 0-2 rounds=50

Every algorithm of a seed has the same partition. All runs share one connection to Ray
(``execution.backend=inline`` needs none). ``--out`` gets ``runs.csv`` (a row a run), ``table.csv`` and
``table.md`` (a row an algorithm: mean and standard deviation over the seeds; where groups are planted also
the accuracy of each and the variance of the clients within and between them), and the run directories.
A run that is already there, finished, with the same config, is not run again: after a change of the code
take another folder.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rayfl import api
from rayfl.config import Config, load, on_the_same_data, variant
from rayfl.errors import ConfigError, RayflError
from rayfl.servers import building
from rayfl.servers.driver import Interrupted

METRICS = {
    "accuracy_mean": "mean accuracy (%)",
    "accuracy_worst10": "worst 10 % (%)",
    "accuracy_var": "variance (%²)",
    "clusters": "clusters",
    "ari": "ARI",
    "bytes_up": "sent up (bytes)",
}
"""The columns of the table: keys of ``summary.json`` and what they are called."""

MOST_GROUPS = 12
"""Planted groups with columns of their own."""


def seeds_of(text: str) -> list[int]:
    """``"0-2,7"`` is 0, 1, 2, 7.

    Raises:
        ConfigError: if it is not such a list.
    """
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            seeds.extend(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ConfigError(
            "--seeds", f"got {text!r}", "expected numbers and ranges such as 0-5 or 0,3"
        ) from None
    if len(seeds) != len(set(seeds)) or not seeds:
        raise ConfigError("--seeds", f"got {text!r}", "expected every seed once")
    return seeds


def run_all(configs: Sequence[Config]) -> Iterator[dict[str, Any]]:
    """Run what is not yet there; a row of ``runs.csv`` each."""
    for config in configs:
        building.check(config)
    for i, config in enumerate(configs, 1):
        result = _finished(config) or api.run(config)
        summary = {name: value for name, value in result.summary.items() if not isinstance(value, list)}
        groups = result.summary.get("by_group") or []
        for group in groups if len(groups) <= MOST_GROUPS else []:
            summary[f"accuracy_group_{group['id']}"] = group["accuracy_mean"]
        row = {"algorithm": config.algorithm.name, "seed": config.seed, **summary}
        accuracy = f"accuracy {row['accuracy_mean']:.1f} %, worst tenth {row['accuracy_worst10']:.1f} %"
        print(f"{i}/{len(configs)}  {row['algorithm']}, seed {row['seed']}: {accuracy}", flush=True)
        yield {**row, "path": str(result.path)}


def _finished(config: Config) -> api.Result | None:
    """A finished run of this config below its ``output.root``."""
    for path in sorted(config.output.root.glob(f"{config.name}-{config.algorithm.name}-*/summary.json")):
        result = api.Result(path.parent.resolve())
        settings, wanted = result.config.to_dict(), config.to_dict()
        if wanted["training"]["engine"] == "auto":  # the run wrote down which one it was
            wanted["training"]["engine"] = settings["training"]["engine"]
        if all(settings[key] == wanted[key] for key in wanted if key != "output"):
            return result
    return None


def metrics_of(runs: pd.DataFrame) -> dict[str, str]:
    """:data:`METRICS`, and of planted groups the accuracy of each and the variance within and between."""
    groups = [name for name in runs.columns if name.startswith("accuracy_group_")]
    return {
        **METRICS,
        **{name: f"group {name.rpartition('_')[2]} (%)" for name in groups},
        **({"group_var_within": "within groups (%²)", "group_var_between": "between (%²)"} if groups else {}),
    }


def table(runs: pd.DataFrame, metrics: Mapping[str, str] = METRICS) -> pd.DataFrame:
    """Mean and (sample) standard deviation over the seeds, in the order in which algorithms first appear.

    Args:
        runs: a row a run, with ``algorithm`` and ``seed``; what a run has no number for is NaN.
        metrics: the columns to summarize.
    """
    groups = runs.groupby("algorithm", sort=False)
    columns: dict[str, Any] = {"seeds": groups.size()}
    for metric in metrics:
        values = groups[metric]
        columns[metric], columns[f"{metric}_std"] = values.mean(), values.std(ddof=1)
    return pd.DataFrame(columns)


def markdown(summary: pd.DataFrame, metrics: Mapping[str, str] = METRICS) -> str:
    """The table as text: ``mean ± standard deviation``, a dash where a number does not apply."""
    lines = [["algorithm", "seeds", *metrics.values()], ["---", *["--:"] * (len(metrics) + 1)]]
    for name, row in summary.iterrows():
        if math.isnan(row.get("ari", math.nan)) and row["clusters"] == 1:  # a method that does not cluster
            row["clusters"] = math.nan
        cells = [_cell(row[metric], row[f"{metric}_std"]) for metric in metrics]
        lines.append([str(name), f"{row['seeds']:.0f}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(mean: float, spread: float) -> str:
    if math.isnan(mean):
        return "–"
    digits = 0 if abs(mean) >= 1000 else 2
    return f"{mean:,.{digits}f}" + ("" if math.isnan(spread) else f" ± {spread:,.{digits}f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=None
    )
    parser.add_argument("config", help="a preset or a YAML file")
    parser.add_argument("overrides", nargs="*", help="settings such as rounds=50")
    parser.add_argument(
        "--algorithms", default="", help="names, separated by commas; the config's own if empty"
    )
    parser.add_argument("--seeds", default="0-2", help="such as 0-5 or 0,3,7 (default: 0-2)")
    parser.add_argument("--out", type=Path, default=Path("runs/compare-seeds"), help="folder of the results")
    options = parser.parse_intermixed_args(arguments)
    try:
        configs = _configs(options)
        rows = pd.DataFrame(list(run_all(configs)))
    except RayflError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted:
        print("stopped; the same command goes on after the last finished run", file=sys.stderr)
        return 130
    metrics = metrics_of(rows)
    summary = table(rows, metrics)
    text = markdown(summary, metrics)
    rows.to_csv(options.out / "runs.csv", index=False)
    summary.to_csv(options.out / "table.csv")
    (options.out / "table.md").write_text(text)
    print(f"\n{text}\nwritten to {options.out}/: runs.csv, table.csv, table.md")
    return 0


def _configs(options: argparse.Namespace) -> list[Config]:
    names = [name.strip() for name in options.algorithms.split(",") if name.strip()]

    names = names or [load(options.config, options.overrides).algorithm.name]
    configs = []
    for seed in seeds_of(options.seeds):
        changes = [*options.overrides, f"seed={seed}", f"output.root={options.out}"]
        configs += on_the_same_data([variant(options.config, changes, name) for name in names])
    return configs


if __name__ == "__main__":
    sys.exit(main())
