"""What ``rayfl bench`` runs, prints and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rayfl.bench import (
    cluster,
    local,
    measure,
    methods,
    networks,
    population,
    profile,
    reduction,
    startup,
)
from rayfl.bench.own import OwnWorkload
from rayfl.bench.saved import SavedFigures
from rayfl.bench.workloads import WORKLOADS
from rayfl.config import kinds
from rayfl.config.reading import presets
from rayfl.errors import ConfigError, nearest
from rayfl.runtime.environment import machine, versions
from rayfl.runtime.ray_backend import settle
from rayfl.training.precision import Precision
from rayfl.units import UNKNOWN, three_digits

TASKS = (
    *WORKLOADS,
    *("startup", "cluster", "population", "reduction", "local", "methods", "networks", "profile"),
)


def bench(
    tasks: Sequence[str],
    rounds: int,
    out: Path | None,
    console: Console,
    device: str = "cpu",
    precision: str = "float32",
) -> dict[str, Any]:
    """Run the named benchmarks (by default all workloads), print tables, and write JSON.

    Args:
        tasks: names of benchmarks; or a config (a preset's name or a YAML file) and dotted settings.
        rounds: measured rounds of each workload.
        out: file for all figures. Those of ``methods`` and ``networks`` are written as they are measured; if
            the file is from a process that was stopped, its figures are not measured again.
        console: where tables are printed.
        device: ``cpu`` or ``cuda``, for rayfl and the plain loop; on a GPU ``networks`` is measured by
            default, too.
        precision: ``bf16`` measures ``networks`` in reduced precision, too.

    Raises:
        ConfigError: for an unknown name, one that is not measured on a GPU, a config that is not measured on
            the CPU, or if there is no GPU.
        DataError: if the config's data are missing.
    """
    _check_device(device, tasks)
    reduced = _precision(precision, tasks)
    own_task = _own_workload(tasks)
    if own_task and device == "cpu":
        own_task.refuse_gpu()
    default_tasks = [*WORKLOADS, "networks"] if device == "cuda" else list(WORKLOADS)
    chosen = [] if own_task else list(tasks) or default_tasks
    settle()  # in a run the driver's actor does the same; here the driver is in this process
    result: dict[str, Any] = {"machine": machine(), "versions": versions(), "device": device}
    saved = SavedFigures(out, rounds, result)

    def say(text: str) -> None:
        console.print(f"  {text}", highlight=False)

    workloads = [WORKLOADS[name] for name in chosen if name in WORKLOADS]
    if workloads:
        result["workloads"] = [measure.measure(w, rounds, {}, say, device) for w in workloads]
        console.print(
            _table("rayfl against a plain PyTorch loop in two processes", result["workloads"], _SPEED)
        )
    if own_task:
        row = measure.measure(own_task, rounds, {}, say, device)
        if device == "cpu":
            say("start-up of both, in processes of their own")
            row.update(startup.own_first_rounds(own_task, own_task.config(Path()).execution.backend))
        result["own"] = [row]
        console.print(
            _table(f"{own_task.name} ({own_task.about}), against FedAvg in a plain PyTorch loop", [row], _OWN)
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
        "methods": (
            "methods: CPU milliseconds a round in one process, times FedAvg's, and times per client trained",
            partial(methods.run, rounds, say=say, saved=saved.rows("methods")),
            _METHODS,
        ),
        "networks": (
            "engines, the plain loop and the floor: "
            + ("seconds a round on the GPU" if device == "cuda" else "CPU seconds a round, one thread"),
            partial(
                networks.run,
                rounds,
                say=say,
                saved=saved.rows("networks"),
                device=device,
                precision=reduced,
            ),
            _NETWORKS if reduced == "float32" else _REDUCED,
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
        saved.finish()
        console.print(f"written: {out}", soft_wrap=True, highlight=False)
    return result


def _check_device(device: str, tasks: Sequence[str]) -> None:
    """Refuse what cannot be measured on a device.

    Raises:
        ConfigError: if there is no such device, or no measurement on it.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError("--device", f"got {device!r}", "expected cpu or cuda")
    if device == "cpu":
        return
    cpu_only = [name for name in tasks if name in TASKS and name not in (*WORKLOADS, "networks")]
    if cpu_only:
        raise ConfigError(
            "--device",
            f"{cpu_only[0]} is measured on the CPU only",
            "on a GPU run W1, W2, W3, networks or a config",
        )
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--device", "no CUDA device here", "rayfl doctor says what there is")


def _precision(precision: str, tasks: Sequence[str]) -> Precision:
    """The precision that is asked for.

    Raises:
        ConfigError: if there is no such precision, or no measurement in it.
    """
    if precision == "float32":
        return "float32"
    if precision != "bf16":
        raise ConfigError("--precision", f"got {precision!r}", "expected float32 or bf16")
    if list(tasks) != ["networks"]:
        remedy = "use rayfl bench networks --precision bf16; for a config set training.precision=bf16"
        raise ConfigError("--precision", "is only for the benchmark networks", remedy)
    return "bf16"


def _own_workload(tasks: Sequence[str]) -> OwnWorkload | None:
    """The config, if one is named.

    Raises:
        ConfigError: if a name is neither a config nor a benchmark, or if both are named.
        DataError: if the config's data are missing.
    """
    arguments = [name for name in tasks if name not in TASKS]
    if not arguments:
        return None
    config, overrides = arguments[0], arguments[1:]
    if "=" in config:
        what = f"{config} is a setting, and no config is named"
        raise ConfigError("bench", what, f"use rayfl bench config.yaml {config}")
    kinds.bring()  # plug-ins may have presets
    known = presets()
    if config not in known and not Path(config).is_file():
        remedy = nearest(config, (*TASKS, *known))
        raise ConfigError("bench", f"no benchmark, preset or file named {config!r}", remedy)
    if len(arguments) < len(tasks):
        raise ConfigError(
            "bench", "a config and benchmarks cannot be measured together", "use rayfl bench " + config
        )
    return OwnWorkload.of(config, overrides)


_STARTUP = ("commands", "imports", "steps")
"""Further tables of the benchmark ``startup``."""

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

_OWN = {
    "plain_seconds": "plain\ns/round",
    "rayfl_seconds": "rayfl\ns/round",
    "ratio": "times\nfaster",
    "plain_startup": "plain\nstart s",
    "rayfl_startup": "rayfl\nstart s",
    "plain_memory_gb": "plain\nGB",
    "memory_gb": "rayfl\nGB",
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


_METHODS = {
    "method": "method",
    **{
        f"{workload}_{kind}": f"{workload}\n{heading}"
        for workload in WORKLOADS
        for kind, heading in (("ms", "ms"), ("times", "times"), ("each", "each"))
    },
}

_NETWORKS = {
    "network": "network",
    "engine": "engine",
    "loop_seconds": "plain\ns",
    "seconds": "rayfl\ns",
    "ratio": "times\nfaster",
    "floor_seconds": "floor\ns",
    "times_floor": "times\nfloor",
}

_REDUCED = {
    "network": "network",
    "engine": "float32\nengine",
    "loop_seconds": "plain\ns",
    "seconds": "rayfl\ns",
    "reduced_engine": "reduced\nengine",
    "reduced_seconds": "reduced\ns",
    "reduced_ratio": "times\nfaster",
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
        return UNKNOWN
    if isinstance(value, float):
        return three_digits(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
