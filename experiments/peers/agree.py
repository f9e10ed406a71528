"""Correctness: the same tiny federation in all systems, and the largest deviation of their final weights.

    python experiments/peers/agree.py                      # systems that are installed
    python experiments/peers/agree.py --systems flwr pfl --write

Four clients take part in each of three rounds of three epochs, with momentum 0.5. A client's images are one
batch, so that the order in which they are shuffled does not matter. The client scripts are those
of the timings. ``--write`` writes the whole page ``results/agreement.md``: the table and its caption.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import systems
import tasks
from measure import environment
from shared import Task

CASES: Mapping[str, tuple[int, ...]] = {"24 images each": (24, 24, 24, 24), "8 to 24 images": (8, 12, 20, 24)}
"""Numbers of images of the four clients."""

Weights = list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]


def tiny(folder: Path, sizes: tuple[int, ...]) -> Path:
    """Write the federation to a folder: random images of 8 x 8, an MLP 64-32-10, three rounds."""
    task = Task("agree", "mlp32", (1, 8, 8), 10, 4, sum(sizes) // 4, 4, 3, max(sizes), 0.1, 0.5, "", 3, sizes)
    tasks.write(tasks.Workload(task, "", ""), folder)
    return folder


def final(system: systems.System, folder: Path) -> Weights | str:
    """The weights after three rounds, in the order of the layers; or the reason why there are none."""
    path = folder / f"{system.name}.npz"
    variables = {**environment(system, folder, folder / "marks", 1), "PEERS_FINAL": str(path)}
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch, open(folder / "log", "w") as log:
        try:
            subprocess.run(
                system.command(), cwd=scratch, env=variables, stdout=log, stderr=log, timeout=600, check=False
            )
        except subprocess.TimeoutExpired:
            return "took more than ten minutes"
    if not path.exists():
        lines = (folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "wrote nothing"
    with np.load(path) as arrays:
        return [arrays[name] for name in arrays.files]


def deviation(found: Weights, expected: Weights) -> float:
    """The largest difference of a weight."""
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))


def table(names: Sequence[str]) -> str:
    """The deviations from the plain loop, in Markdown."""
    rows: dict[str, list[str]] = {name: [] for name in names if name != "plain"}
    changes = []
    with tempfile.TemporaryDirectory(prefix="peers-agree-") as scratch:
        for number, (case, sizes) in enumerate(CASES.items()):
            folder = tiny(Path(scratch) / str(number), sizes)
            expected = final(systems.SYSTEMS["plain"], folder)
            if isinstance(expected, str):
                raise SystemExit(f"plain: {expected}")
            changes.append(deviation(expected, _start()))
            for name, cells in rows.items():
                found = final(systems.SYSTEMS[name], folder)
                cells.append(found if isinstance(found, str) else f"{deviation(found, expected):.1e}")
                print(f"{case}, {name}: {cells[-1]}", flush=True)
    lines = [
        "Largest deviation of a final weight from that of a plain PyTorch loop. For comparison, the last",
        "line has the largest change of a weight in the three rounds.",
        "",
        f"| system | {' | '.join(CASES)} |",
        "| --- " * (1 + len(CASES)) + "|",
        *(f"| {systems.SYSTEMS[name].title} | {' | '.join(cells)} |" for name, cells in rows.items()),
        f"| *largest change* | {' | '.join(f'{value:.1e}' for value in changes)} |",
    ]
    return "\n".join(lines) + "\n"


def _start() -> Weights:
    """The initial weights."""
    from networks import build

    return [tensor.numpy() for tensor in build("mlp32", (1, 8, 8), 10).state_dict().values()]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    installed = [name for name, system in systems.SYSTEMS.items() if system.installed]
    parser.add_argument("--systems", nargs="*", default=installed, choices=list(systems.SYSTEMS))
    parser.add_argument("--write", action="store_true", help="keep the table")
    options = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    text = table(options.systems)
    print(text)
    if options.write:
        place = Path(__file__).parent / "results"
        place.mkdir(exist_ok=True)
        (place / "agreement.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
