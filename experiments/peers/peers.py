"""Head to head: rayfl, a plain PyTorch loop and other simulators on the same work, in turns.

    python experiments/peers/peers.py install                # an environment for each system
    python experiments/peers/peers.py run                    # everything, three times, in turns; resumable
    python experiments/peers/peers.py run --quick --workloads W1 W2 W3
    python experiments/peers/peers.py report                 # table.md, figure.svg, results.json

``run`` skips measurements that exist already. Stop it with Ctrl-C, and start it again to continue.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
import report
import systems
import tasks

from rayfl.errors import ConfigError, RayflError, nearest

RESULTS = Path(__file__).parent / "results"


def install(options: argparse.Namespace) -> None:
    """Create the environments."""
    for name in _checked_names(options.systems, systems.SYSTEMS, "system"):
        systems.install(systems.SYSTEMS[name], print)


def run(options: argparse.Namespace) -> None:
    """Measure what is not measured yet."""
    names = _checked_names(options.systems, systems.SYSTEMS, "system")
    workloads = _checked_names(options.workloads, tasks.WORKLOADS, "workload")
    limits = measure.Limits(patience=options.patience)
    if options.quick:
        limits = measure.Limits(warm_up=0, rounds=2, seconds=2.0, patience=options.patience)
    for repetition in range(options.repetitions):
        for name in workloads:
            workload = tasks.quick(tasks.WORKLOADS[name]) if options.quick else tasks.WORKLOADS[name]
            place = options.out / ("quick" if options.quick else "full") / name
            turn = names[repetition % len(names) :] + names[: repetition % len(names)]
            for system in turn:
                path = place / f"{system}-{repetition}.json"
                reason = _left_out(systems.SYSTEMS[system], name)
                if path.exists() or reason:
                    if reason and not repetition:
                        print(f"{name} {system}: left out, {reason}")
                    continue
                data = tasks.write(workload, (options.out / "data" / place.parent.name / name).resolve())
                result = measure.measure(
                    systems.SYSTEMS[system], Path(data["folder"]), limits, workload.threads
                )
                row = {
                    "workload": name,
                    "about": workload.about,
                    "source": workload.source,
                    "data": data["data"],
                    "system": system,
                    "repetition": repetition,
                    "lines": systems.SYSTEMS[system].lines(),
                    "machine": report.machine(),
                    "commit": report.commit(),
                    **result,
                }
                place.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(row, indent=1) + "\n")
                summary = result.get("error") or f"{result['seconds']:.3f} s a round"
                print(f"{name} {system} {repetition + 1}/{options.repetitions}: {summary}", flush=True)


def write_report(options: argparse.Namespace) -> None:
    """Write the tables and the figure from the measurements."""
    kind = "quick" if options.quick else "full"
    rows = report.read(options.out / kind)
    if not rows:
        raise ConfigError("report", f"no measurements in {options.out / kind}", "peers.py run")
    folder = options.results / kind
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "table.md").write_text(report.markdown(rows))
    report.figure(rows, folder / "figure.svg")
    print(report.markdown(rows))
    print(f"written: {folder}/results.json, table.md, figure.svg")


def _left_out(system: systems.System, workload: str) -> str:
    if not system.installed:
        return f"not installed: peers.py install {system.name}"
    return "" if workload in system.workloads else system.why_not


def _checked_names(names: Sequence[str], choices: Any, what: str) -> list[str]:
    """The names, all if there are none.

    Raises:
        ConfigError: for an unknown one.
    """
    for name in names:
        if name not in choices:
            raise ConfigError(what, f"no such {what} {name!r}", nearest(name, list(choices)))
    return list(names) or list(choices)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    installer = commands.add_parser("install", help="make the environments of systems, by default of all")
    installer.add_argument("systems", nargs="*")
    installer.set_defaults(work=install)
    runner = commands.add_parser("run", help="measure in turns what is not measured yet")
    runner.add_argument("--systems", nargs="*", default=[])
    runner.add_argument("--workloads", nargs="*", default=[])
    runner.add_argument("--repetitions", type=int, default=3)
    runner.add_argument("--patience", type=float, default=900.0, help="seconds after which one is given up")
    runner.set_defaults(work=run)
    reporter = commands.add_parser("report", help="write the tables and the figure")
    reporter.add_argument("--results", type=Path, default=RESULTS, help="folder of the reports")
    reporter.set_defaults(work=write_report)
    for command in (runner, reporter):
        command.add_argument(
            "--quick", action="store_true", help="two rounds, smaller ResNets; its own results"
        )
        command.add_argument("--out", type=Path, default=Path("runs/peers"), help="folder of measurements")
    options = parser.parse_args(arguments)
    try:
        options.work(options)
    except RayflError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
