"""Tables and the figure of the comparison."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from systems import SKIPPED, SYSTEMS

from rayfl.runtime.environment import machine as describe
from rayfl.units import three_digits

Row = Mapping[str, Any]


_MACHINE = ("processor", "cores", "memory_gb", "gpus", "python")
"""What a reader needs to know about the machine; the rest may change from run to run."""


def machine() -> dict[str, Any]:
    """What a result was measured on."""
    description = describe()
    return {key: description[key] for key in _MACHINE}


def commit() -> str:
    """The abbreviated commit of this checkout; empty outside a checkout."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    process = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return process.stdout.strip()


def read(folder: Path) -> list[dict[str, Any]]:
    """All measurements below a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*/*.json"))]


def ratios(rows: Iterable[Row], workload: str, system: str) -> list[float]:
    """Seconds per round of the system divided by those of rayfl, for each repetition."""
    seconds = {
        (row["system"], row["repetition"]): row["seconds"]
        for row in rows
        if row["workload"] == workload and "seconds" in row
    }
    return [
        taken / seconds["rayfl", repetition]
        for (name, repetition), taken in sorted(seconds.items())
        if name == system and ("rayfl", repetition) in seconds
    ]


def markdown(rows: Sequence[Row]) -> str:
    """One table per workload, and what was left out."""
    by_workload: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_workload[row["workload"]].append(row)
    machines = sorted({_machine_line(row["machine"]) for row in rows})
    load = statistics.median(row["load"] for row in rows)
    commits = ", ".join(sorted({row["commit"] for row in rows if row.get("commit")}))
    repetitions = 1 + max(row["repetition"] for row in rows)
    measured = {row["system"] for row in rows}
    lines = [
        f"Measured on {'; '.join(machines)}. Median load of the machine before a measurement: {load:.1f}.",
        f"rayfl at commit {commits or 'unknown'}. At most {repetitions} repetition{'s' * (repetitions > 1)}.",
        "",
        "Seconds are medians over repetitions, with the range in parentheses. *Times rayfl*: the median",
        "of the ratios within a repetition; above 1 the system takes longer than rayfl. *Start-up*: from the",
        "start of the process to the end of its first round, minus the median round; 0 if rounds vary by",
        "more than that. *Memory*: proportional set size of all processes. *Lines*: of the client script,",
        "without the network and the reading of data.",
        "",
        *(f"- {each.title}: {each.about}." for name, each in SYSTEMS.items() if name in measured),
        "",
    ]
    for name, workload_rows in by_workload.items():
        data = sorted({row["data"] for row in workload_rows})
        lines += [
            f"### {name}: {workload_rows[0]['about']}",
            "",
            f"From {workload_rows[0]['source']}. Data: {', '.join(data)}.",
            "",
            "| system | s / round | times rayfl | CPU s / round | start-up s | memory GB | lines |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for system in SYSTEMS:
            system_rows = [row for row in workload_rows if row["system"] == system]
            if system_rows:
                lines.append(_line(system_rows, ratios(workload_rows, name, system)))
        lines.append("")
    lines += ["Not run:", "", *(f"- {name}: {why}" for name, why in SKIPPED.items())]
    lines += [f"- {s.title} on some workloads: {s.why_not}" for s in SYSTEMS.values() if s.why_not]
    return "\n".join(lines) + "\n"


def _line(rows: Sequence[Row], paired: Sequence[float]) -> str:
    """The line of a system in the table of a workload."""
    system = SYSTEMS[rows[0]["system"]]
    complete = [row for row in rows if "seconds" in row]
    if not complete:
        return f"| {system.title} | failed: {rows[0]['error']} | | | | | {rows[0]['lines']} |"
    cells = [
        system.title,
        _spread([row["seconds"] for row in complete]),
        _spread(paired) if paired else "",
        f"{_median(complete, 'cpu_seconds'):.3g}",
        f"{max(0.0, _median(complete, 'startup')):.1f}",
        f"{_median(complete, 'memory_gb'):.2f}",
        str(rows[0]["lines"]),
    ]
    return f"| {' | '.join(cells)} |"


def _median(rows: Sequence[Row], key: str) -> float:
    return statistics.median(float(row[key]) for row in rows)


def _spread(values: Sequence[float]) -> str:
    """The median, and the minimum and maximum if there are several values."""
    text = three_digits(statistics.median(values))
    return text if len(values) < 2 else f"{text} ({three_digits(min(values))} to {three_digits(max(values))})"


def _machine_line(info: Mapping[str, Any]) -> str:
    gpus = "".join(f", {name}" for name in info["gpus"])
    return (
        f"{info['processor']}, {info['cores']} cores, {info['memory_gb']:.0f} GB{gpus}, "
        f"Python {info['python']}"
    )


_MARKERS = "os^vDPX"


def figure(rows: Sequence[Row], path: Path) -> None:
    """One line per workload with a mark per system: seconds per round divided by rayfl's, logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    about = {row["workload"]: row["about"].partition(":")[0].partition(",")[0] for row in rows}
    others = [name for name in SYSTEMS if name != "rayfl"]
    drawing = Figure(figsize=(8, 1.3 + 0.3 * len(about)), layout="constrained", facecolor="white")
    FigureCanvasAgg(drawing)
    axes = drawing.subplots()
    axes.axvline(1, color="black", linewidth=1.5)
    for marker, system in zip(_MARKERS, others, strict=False):
        by_position = {n: ratios(rows, workload, system) for n, workload in enumerate(about)}
        positions = [n for n, values in by_position.items() if values]
        medians = [statistics.median(by_position[n]) for n in positions]
        axes.plot(medians, positions, marker, markersize=6, alpha=0.85, label=SYSTEMS[system].title)
    axes.set_xscale("log")
    axes.set_yticks(
        range(len(about)),
        [text if name in text.lower() else f"{name}, {text}" for name, text in about.items()],
    )
    axes.grid(axis="both", color="0.9")
    axes.set_axisbelow(True)
    axes.invert_yaxis()
    axes.set_xlabel("seconds per round, relative to rayfl")
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.legend(
        fontsize="small", ncols=len(others), loc="lower center", bbox_to_anchor=(0.3, 1), frameon=False
    )
    drawing.savefig(path)
