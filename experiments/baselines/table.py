"""A table of many methods, each with settings of its own, on the same partitions: mean and spread over seeds.

::

    python experiments/baselines/table.py experiments/baselines/label_skew_20.yaml --out runs/label-skew-20

``--seeds 0 --only "FedAvg; CFL"`` makes a part of it.

The YAML file names a config, settings for all methods, and for each method its algorithm, its own settings
and what the paper has. ``--out`` gets ``runs.csv`` (a row a run), ``table.csv`` and ``table.md``, written
anew after every run, and the run directories. A run that is already there, finished, with the same config, is
not run again, so the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rayfl import api
from rayfl.config import Config, load, on_the_same_data, variant
from rayfl.errors import ConfigError, RayflError, nearest
from rayfl.servers.driver import Interrupted

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from compare_seeds import markdown, run_all, seeds_of, table

METRICS = {
    "accuracy_mean": "mean accuracy (%)",
    "finetuned_accuracy_mean": "fine-tuned, + (%)",
    "paper": "paper (%)",
    "accuracy_worst10": "worst 10 % (%)",
    "accuracy_var": "variance (%²)",
    "rounds_to_target": "rounds to the target",
    "clusters": "clusters",
    "ari": "ARI",
    "bytes_up": "sent up (bytes)",
    "bytes_down": "sent down (bytes)",
    "seconds": "seconds",
}
"""The columns of a table, as far as some run has the number."""


class Method(BaseModel):
    """A row: an algorithm with settings of its own, and the paper's figure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    algorithm: str
    settings: tuple[str, ...] = ()
    paper: float | None = None


class Plan(BaseModel):
    """The YAML file: what all methods share, the target (accuracy in %), and the methods by their labels."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: str
    settings: tuple[str, ...] = ()
    seeds: str = "0-2"
    target: float | None = Field(None, gt=0, le=100)
    methods: dict[str, Method] = Field(min_length=1)


@dataclass(frozen=True)
class Row:
    """A run to be made: its method's label, the paper's figure, its config."""

    label: str
    paper: float | None
    config: Config


def read(path: Path) -> Plan:
    """A plan.

    Raises:
        ConfigError: in one line, if it is none.
    """
    try:
        return Plan.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(str(path), f"not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path}: {where}", first["msg"], "see label_skew_20.yaml") from None


def rows(plan: Plan, seeds: Sequence[int], labels: Sequence[str], changes: Sequence[str]) -> list[Row]:
    """The runs, all methods of a seed one after the other.

    Args:
        plan: what the file says.
        seeds: of the runs.
        labels: the methods to run; all if empty.
        changes: settings of every run, over those of the file's ``settings``. A method's own come last.

    Raises:
        ConfigError
    """
    for label in labels:
        if label not in plan.methods:
            raise ConfigError("--only", f"no method {label!r}", nearest(label, plan.methods))
    result = []
    for seed in seeds:
        configs = []
        for label, method in plan.methods.items():
            try:
                shared = variant(plan.config, [*plan.settings, *changes, f"seed={seed}"], method.algorithm)
                configs.append(load(shared, method.settings))
            except ConfigError as error:
                raise ConfigError(f"{label}: {error.where}", error.what, error.remedy) from None
        # All methods count, those that are not run now too: a part of the table has the whole table's data.
        by_label = dict(zip(plan.methods, on_the_same_data(configs), strict=True))
        result += [Row(label, plan.methods[label].paper, by_label[label]) for label in labels or plan.methods]
    return result


def rounds_to(target: float | None, tested: pd.DataFrame) -> float | None:
    """After how many rounds the mean accuracy of a run (its ``rounds.csv``) first reached the target."""
    if target is None:
        return None
    reached = tested.loc[tested["accuracy_mean"] >= target, "round"]
    return None if reached.empty else 1.0 + reached.iloc[0]  # rounds count from 0


def run(plan: Sequence[Row], out: Path, target: float | None = None) -> str:
    """Run what is not there yet and write the table after every run; the last one as Markdown."""
    done: list[dict[str, Any]] = []
    text = ""
    for row, result in zip(plan, run_all([row.config for row in plan]), strict=True):
        reached = rounds_to(target, api.Result(Path(result["path"])).rounds)
        done.append({**result, "algorithm": row.label, "paper": row.paper, "rounds_to_target": reached})
        runs = pd.DataFrame(done)
        runs = runs.reindex(columns=[*dict.fromkeys([*runs.columns, *METRICS])])
        metrics = {name: title for name, title in METRICS.items() if runs[name].notna().any()}
        summary = table(runs.astype(dict.fromkeys(metrics, float)), metrics)
        if "paper" in metrics:
            summary["paper_std"] = float("nan")  # the same figure for every seed
        text = markdown(summary, metrics)
        runs.to_csv(out / "runs.csv", index=False)
        summary.to_csv(out / "table.csv")
        (out / "table.md").write_text(text)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path, help="a YAML file such as label_skew_20.yaml")
    parser.add_argument("overrides", nargs="*", help="settings of every run such as rounds=50")
    parser.add_argument("--seeds", default="", help="such as 0-5 or 0,3,7; the file's own if empty")
    parser.add_argument("--only", default="", help="labels of methods, separated by semicolons; all if empty")
    parser.add_argument("--out", type=Path, default=Path("runs/baselines"), help="folder of the results")
    options = parser.parse_intermixed_args(arguments)
    try:
        plan = read(options.plan)
        seeds = seeds_of(options.seeds or plan.seeds)
        labels = [label.strip() for label in options.only.split(";") if label.strip()]
        chosen = rows(plan, seeds, labels, [f"output.root={options.out}", *options.overrides])
        text = run(chosen, options.out, plan.target)
    except RayflError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted:
        print("stopped; the same command goes on after the last finished run", file=sys.stderr)
        return 130
    print(f"\n{text}\nwritten to {options.out}/: runs.csv, table.csv, table.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
