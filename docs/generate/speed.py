"""The tables of ``docs/reference/speed.md`` that ``rayfl bench`` measures.

``python docs/generate/speed.py`` measures workloads, methods and networks (minutes on an idle machine; on a
busy one the times say little), writes them to ``speed.json`` beside this file, and the tables to the page.
Each figure of methods and networks is written to ``build/`` as it is measured: stopped and called again, it
goes on where it was. ``--only methods`` measures one of them, ``--only bf16`` the networks in reduced
precision, too, ``--only gpu`` all that is measured on a GPU, ``--written`` none: it writes the tables of
``speed.json``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfl.units import three_digits

FIGURES = Path(__file__).with_name("speed.json")
PAGE = Path(__file__).parents[1] / "reference" / "speed.md"
UNFINISHED = Path(__file__).parents[2] / "build"
ON_CPU, REDUCED, ON_GPU = ("workloads", "methods", "networks"), "bf16", "gpu"
WORKLOADS = ("W1", "W2", "W3")


def methods(rows: Sequence[Mapping[str, Any]]) -> str:
    """CPU time of a round of each method, how many times that of FedAvg it is, and that per client (which
    older figures lack).
    """
    figures = ["ms", "times"] + ["each"] * any(f"{WORKLOADS[0]}_each" in row for row in rows)
    titles = {"ms": "{}, CPU ms", "times": "x FedAvg", "each": "per client"}
    head = [titles[figure].format(name) for name in WORKLOADS for figure in figures]
    lines = [f"| method | {' | '.join(head)} |", "| --- |" + " --- |" * len(head)]
    for row in rows:
        cells = [_cell(figure, row.get(f"{name}_{figure}")) for name in WORKLOADS for figure in figures]
        lines.append(f"| `{row['method']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(figure: str, value: float | None) -> str:
    if value is None:
        return "–"
    return _whole(value) if figure == "ms" else f"{value:.2f}"


def _whole(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def networks(rows: Sequence[Mapping[str, Any]], unit: str = "CPU s") -> str:
    """Time of networks in the engine that ``auto`` takes, against the plain loop and the floor."""
    lines = [
        f"| network | engine | plain, {unit} | rayfl, {unit} | times faster | floor, {unit} | times floor |",
        "| --- |" + " --- |" * 6,
    ]
    numbers = ("loop_seconds", "seconds", "ratio", "floor_seconds", "times_floor")
    for row in rows:
        cells = " | ".join(three_digits(row[number]) for number in numbers)
        lines.append(f"| {row['network']} | {_engine(row['engine'])} | {cells} |")
    return "\n".join(lines)


def reduced(rows: Sequence[Mapping[str, Any]], unit: str = "CPU s") -> str:
    """Time of networks in float32 and in bfloat16, each in the engine that ``auto`` takes for it."""
    lines = [
        f"| network | engine | float32, {unit} | engine for bf16 | bf16, {unit} | times faster |",
        "| --- |" + " --- |" * 5,
    ]
    for row in rows:
        cells = (
            _engine(row["engine"]),
            three_digits(row["seconds"]),
            _engine(row["reduced_engine"]),
            three_digits(row["reduced_seconds"]),
            f"{row['reduced_ratio']:.2f}",
        )
        lines.append(f"| {row['network']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _engine(opened: str) -> str:
    """``batched on cuda without graphs: each client ...`` in short."""
    name, *rest = opened.split()
    return f"`{name}`" + (", no graphs" if "without" in rest else "")


def workloads(rows: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of a round of the workloads, in two processes on each side, and the range of the ratios."""
    lines = [
        "| workload | plain, s | rayfl, s | times faster | from turn to turn |",
        "| --- |" + " --- |" * 4,
    ]
    for row in rows:
        cells = [f"{row[number]:.3g}" for number in ("plain_seconds", "rayfl_seconds", "ratio")]
        cells.append(f"{min(row['ratios']):.3g} to {max(row['ratios']):.3g}")
        lines.append(f"| {row['workload']}: {row['about']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu(found: Mapping[str, Any]) -> str:
    """The workloads and the networks on a GPU, and the networks in reduced precision."""
    rows = found["networks"]
    return "\n\n".join([workloads(found["workloads"]), networks(rows, "s"), reduced(rows, "s")])


def written(page: str, figures: Mapping[str, Any]) -> str:
    """The page with the tables of these figures between its markers."""
    tables: dict[str, Callable[[Any], str]] = {
        "workloads": workloads,
        "methods": methods,
        "networks": networks,
        REDUCED: reduced,
        ON_GPU: gpu,
    }
    for name, table in tables.items():
        if name in figures:
            machine = figures[f"{name}_machine"]
            device = ", ".join([*machine.get("gpus", []), machine["processor"]])
            about = f"Measured on {device}, {machine['cores']} cores, Python {machine['python']}."
            text = f"<!-- {name} -->\n\n{about}\n\n{table(figures[name])}\n\n<!-- /{name} -->"
            parts = re.split(f"<!-- /?{name} -->", page)
            assert len(parts) == 3, f"{PAGE.name} has no place for {name}"
            page = parts[0] + text + parts[2]
    return page


def main() -> None:
    """Measure, and write figures and page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[*ON_CPU, REDUCED, ON_GPU])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--written", action="store_true")
    given = parser.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    if not given.written:
        from rich.console import Console

        from rayfl.bench.command import bench

        UNFINISHED.mkdir(exist_ok=True)

        def measured(part: str, device: str = "cpu", precision: str = "float32") -> Mapping[str, Any]:
            tasks = list(WORKLOADS) if part == "workloads" else [part]
            so_far = UNFINISHED / f"speed-{part}-{device}-{precision}.json"
            return bench(tasks, given.rounds, so_far, Console(), device, precision)

        for name in [given.only] if given.only else ON_CPU:
            if name == ON_GPU:
                rounds, rows = measured("workloads", "cuda"), measured("networks", "cuda", "bf16")
                both = {"workloads": rounds["workloads"], "networks": rows["networks"]}
                figures |= {name: both, f"{name}_machine": rounds["machine"]}
            else:
                part = "networks" if name == REDUCED else name
                found = measured(part, precision="bf16" if name == REDUCED else "float32")
                figures |= {name: found[part], f"{name}_machine": found["machine"]}
            FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), figures))


if __name__ == "__main__":
    main()
