"""The tables of ``docs/reference/speed.md`` that ``rayfl bench`` measures.

``python docs/generate/speed.py`` measures methods and networks (minutes on an idle machine; on a busy one
the times say little), writes them to ``speed.json`` beside this file, and the tables to the page. Each
figure is written to ``build/`` as it is measured: stopped and called again, it goes on where it was.
``--only methods`` measures one of them, ``--written`` none: it writes the tables of ``speed.json``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).with_name("speed.json")
PAGE = Path(__file__).parents[1] / "reference" / "speed.md"
UNFINISHED = Path(__file__).parents[2] / "build"
TABLES = ("methods", "networks")
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


def networks(rows: Sequence[Mapping[str, Any]]) -> str:
    """CPU time of networks in the engine that ``auto`` takes, against the plain loop and the floor."""
    lines = [
        "| network | engine | plain, CPU s | rayfl, CPU s | times faster | floor, CPU s | times floor |",
        "| --- |" + " --- |" * 6,
    ]
    numbers = ("loop_seconds", "seconds", "ratio", "floor_seconds", "times_floor")
    for row in rows:
        cells = " | ".join(f"{row[number]:.3g}" for number in numbers)
        lines.append(f"| {row['network']} | `{row['engine']}` | {cells} |")
    return "\n".join(lines)


def written(page: str, figures: Mapping[str, Any]) -> str:
    """The page with the tables of these figures between its markers."""
    for name, table in (("methods", methods), ("networks", networks)):
        if name in figures:
            machine = figures[f"{name}_machine"]
            about = (
                f"Measured on {machine['processor']}, {machine['cores']} cores, Python {machine['python']}."
            )
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
    parser.add_argument("--only", choices=TABLES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--written", action="store_true")
    given = parser.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    if not given.written:
        from rich.console import Console

        from rayfl.bench.command import bench

        for name in [given.only] if given.only else TABLES:
            so_far = UNFINISHED / f"speed-{name}.json"
            so_far.parent.mkdir(exist_ok=True)
            found = bench([name], given.rounds, so_far, Console())
            figures |= {name: found[name], f"{name}_machine": found["machine"]}
            FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), figures))


if __name__ == "__main__":
    main()
