"""What ``rayfl bench`` runs, prints and writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rayfl.bench import cluster, local, measure, networks, population, profile, reduction, startup
from rayfl.bench.workloads import WORKLOADS
from rayfl.errors import ConfigError, nearest
from rayfl.runtime.environment import machine, versions
from rayfl.runtime.ray_backend import settle

TASKS = (*WORKLOADS, "startup", "cluster", "population", "reduction", "local", "networks", "profile")


def bench(tasks: Sequence[str], rounds: int, out: Path | None, console: Console) -> dict[str, Any]:
    """Run the named benchmarks (all workloads if none is named), print tables, write JSON.

    Raises:
        ConfigError: for an unknown name.
    """
    for name in tasks:
        if name not in TASKS:
            raise ConfigError("bench", f"no such benchmark {name!r}", nearest(name, TASKS))
    chosen = list(tasks) or list(WORKLOADS)
    settle()  # the driver is in this process, and its actor in a run does so too
    result: dict[str, Any] = {"machine": machine(), "versions": versions()}

    def say(text: str) -> None:
        console.print(f"  {text}", highlight=False)

    workloads = [WORKLOADS[name] for name in chosen if name in WORKLOADS]
    if workloads:
        result["workloads"] = [measure.measure(w, rounds, {}, say) for w in workloads]
        console.print(
            _table("rayfl against a plain PyTorch loop in two processes", result["workloads"], _SPEED)
        )
    parts: dict[str, tuple[str, Callable[[], list[dict[str, Any]]], dict[str, str]]] = {
        "commands": ("CPU seconds of commands that compute nothing", startup.commands, {}),
        "imports": ("CPU seconds of what the processes of a run import", startup.imports, {}),
        "startup": ("seconds to the first round", startup.first_rounds, {}),
        "steps": ("seconds to the first round of W2, step by step", startup.steps, {}),
        "cluster": ("clustering of signatures", cluster.run, _CLUSTER),
        "population": ("CPU seconds of a round as the population grows", population.run, _POPULATION),
        "reduction": ("the sums of blocks at one LPS: all of them, and in a tree", reduction.run, {}),
        "local": ("local objectives and orders on W1", partial(local.run, rounds, say=say), _LOCAL),
        "networks": (
            "networks with BatchNorm: CPU seconds of 10 clients with 100 images, one thread",
            partial(networks.run, rounds, say=say),
            _NETWORKS,
        ),
        "profile": (
            "milliseconds of a round: time in one process, CPU time on Ray",
            partial(profile.run, rounds, say=say),
            {},
        ),
    }
    for name, (title, run, columns) in parts.items():
        if name in chosen or (name in _STARTUP and "startup" in chosen):
            result[name] = run()
            console.print(_table(title, result[name], columns))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {out}", soft_wrap=True, highlight=False)
    return result


_STARTUP = ("commands", "imports", "steps")
"""What ``startup`` also shows."""

_SPEED = {  # a line of nine columns must fit into 80 characters
    "workload": "task",
    "plain_seconds": "plain\ns/round",
    "rayfl_seconds": "rayfl\ns/round",
    "ratio": "times\nfaster",
    "rayfl_steps_per_second": "client-\nsteps/s",
    "utilisation": "busy",
    "memory_gb": "GB",
    "plain_memory_gb": "plain\nGB",
    "engine": "engine",
}

_CLUSTER = {
    "clients": "clients",
    "way": "way",
    "seconds": "seconds",
    "peak_gb": "peak\nGB",
    "double_loop_seconds": "seconds\nof a loop",
    "ari": "ARI",
    "representatives": "sampled",
    "agreement": "with\nexact",
}


_POPULATION = {
    "clients": "clients",
    "cohort": "a round",
    "tested every": "tests\nevery",
    "start_cpu": "start",
    "driver_cpu": "driver",
    "client actors_cpu": "client\nactors",
    "round_seconds": "s/round",
    "memory_gb": "GB",
}

_LOCAL = {
    "variant": "local work",
    "seconds": "s/round",
    "ratio": "times FedAvg's",
    "least": "least",
    "most": "most",
    "steps_per_second": "client-steps/s",
    "cpu_seconds": "CPU s/round",
    "cpu_ratio": "times FedAvg's CPU",
}


_NETWORKS = {
    "network": "network",
    "parameters": "parameters",
    "engine": "engine",
    "loop_cpu_seconds": "plain\nCPU s",
    "cpu_seconds": "rayfl\nCPU s",
    "ratio": "times\nfaster",
}


def _table(title: str, rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> Table:
    """Rows as a table; ``columns`` maps keys to headings (all keys if empty)."""
    headings = columns or {
        key: key.replace("_", " ") for key in dict.fromkeys(k for row in rows for k in row)
    }
    table = Table(title=title, title_justify="left", pad_edge=False)
    for heading in headings.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(_text(row.get(key)) for key in headings))
    return table


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
