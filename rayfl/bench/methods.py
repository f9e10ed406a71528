"""What a round of every method costs compared with FedAvg's, on the models and clients of W1 to W3 (of W1 a
quarter of the clients, of W3 a population of 2,000).

Everything runs in this process on one thread and is measured in CPU time, which other processes hardly
affect. Each method takes turns with FedAvg, round by round, so that other load affects both equally.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayfl.bench.measure import Rayfl, running
from rayfl.bench.saved import Rows
from rayfl.bench.workloads import WORKLOADS, Workload
from rayfl.errors import ConfigError

_CLUSTERS: dict[str, Any] = {"clustering": {"n_clusters": 4}}

METHODS: Mapping[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"algorithm": "fedprox"},
    "fednova": {"algorithm": "fednova"},
    "scaffold": {"algorithm": "scaffold"},
    "mtl": {"algorithm": "mtl"},
    "curriculum": {"order": "curriculum"},
    "fedavgm": {"algorithm": "fedavgm"},
    "fedadam": {"algorithm": "fedadam"},
    "qfedavg": {"algorithm": "qfedavg"},
    "per_fedavg": {"algorithm": "per_fedavg"},
    "solo": {"algorithm": "solo"},
    "lg_fedavg": {"algorithm": {"name": "lg_fedavg", "local_layers": 1}},
    "sub_fedavg": {"algorithm": "sub_fedavg", "local": {"step": 0.3, "accuracy": 0.0}},
    "pacfl": {"algorithm": "pacfl", **_CLUSTERS},
    "mt_hfl": {"algorithm": "mt_hfl", **_CLUSTERS, "hierarchy": {"common_layers": 1}},
    "cfl": {"algorithm": "cfl"},
    "ifca": {"algorithm": {"name": "ifca", "clusters": 4}},
    "fedsem": {"algorithm": {"name": "fedsem", "clusters": 4}},
    "fedsoft": {"algorithm": {"name": "fedsoft", "clusters": 4}},
    "flis_hc": {"algorithm": "flis_hc", **_CLUSTERS},
}
"""Sections of the config; the first is what the others are compared with. FLIS (DC) is omitted: each of
its clients tests the models of all participants.
"""

MEASURED = (
    replace(WORKLOADS["W1"], clients=600, cohort=120),
    WORKLOADS["W2"],
    replace(WORKLOADS["W3"], clients=2_000),
)
"""W1 to W3. Of W1 a quarter of the clients, since what a method costs grows with them. Of W3 as many clients
in a round, but 2,000 in all instead of 10,000: MT-HFL relates all pairs of clients before it trains, which
takes minutes in one process for 10,000, and what is compared are rounds.
"""

WARM_UP = 2
"""Rounds that are not counted: the first compiles; in the second some clients have state for the first
time.
"""

SETTLED = 0.95
"""Where clients keep something between rounds, this share of them must have it before rounds are counted.
Until then every round asks the system for new memory, which takes longer than the arithmetic of a small
network and differs from hour to hour."""


def run(
    rounds: int = 5,
    workloads: Sequence[Workload] = MEASURED,
    methods: Mapping[str, dict[str, Any]] = METHODS,
    say: Callable[[str], None] = lambda line: None,
    saved: Rows | None = None,
) -> list[dict[str, Any]]:
    """Measure.

    Args:
        rounds: measured rounds of each method.
        workloads: what they run.
        methods: sections of the config by name; the first is what the others are compared with.
        say: called with a line for each method and workload.
        saved: rows that are already known; it also keeps rows once they are measured.

    Returns:
        One row per method: for each workload its median CPU milliseconds per round (``W1_ms``), the median of
        the paired ratios to the first method's round of the same turn (``W1_times``, above 1: slower), the
        median number of clients that trained in a round (``W1_clients``), and the median of the ratios of CPU
        time per client that trained (``W1_each``).
    """
    saved = saved or Rows()
    rows: dict[str, dict[str, Any]] = {name: {"method": name} for name in methods}
    for row in saved.known:
        rows.get(row["method"], {}).update(row)
    first, *_ = methods
    for workload in workloads:
        remaining = {
            name: each for name, each in methods.items() if f"{workload.name}_each" not in rows[name]
        }
        if not remaining:
            continue
        with tempfile.TemporaryDirectory(prefix="rayfl-bench-") as folder:
            for name, turns, base in _paired_turns(
                workload, Path(folder), rounds, (methods[first], remaining)
            ):
                costs = _figures(turns, base)
                rows[name].update({f"{workload.name}_{figure}": value for figure, value in costs.items()})
                say(
                    f"{workload.name} {name}: {costs['ms']:.0f} ms of CPU time, {costs['times']:.2f} x FedAvg"
                    f", {costs['each']:.2f} x per client ({costs['clients']})"
                )
                saved.keep(list(rows.values()))
    return list(rows.values())


@dataclass(frozen=True)
class Turn:
    """A measured round: CPU seconds, and how many clients trained in it."""

    seconds: float
    clients: int

    @property
    def each(self) -> float:
        """CPU seconds per client that trained."""
        return self.seconds / max(1, self.clients)


def _figures(turns: Sequence[Turn], base_turns: Sequence[Turn]) -> dict[str, Any]:
    """The figures of a method on a workload, from its rounds and those of the compared method."""
    pairs = list(zip(turns, base_turns, strict=True))
    return {
        "ms": 1000 * statistics.median(turn.seconds for turn in turns),
        "times": statistics.median(a.seconds / max(b.seconds, 1e-9) for a, b in pairs),
        "clients": round(statistics.median(turn.clients for turn in turns)),
        "each": statistics.median(a.each / max(b.each, 1e-12) for a, b in pairs),
    }


def _paired_turns(
    workload: Workload,
    folder: Path,
    rounds: int,
    compared: tuple[dict[str, Any], Mapping[str, dict[str, Any]]],
) -> Iterator[tuple[str, Sequence[Turn], Sequence[Turn]]]:
    """Yield, for each method, its rounds and those of the compared method in the same turns.

    Args:
        workload, folder, rounds: what is measured, where, and how often.
        compared: sections of what the methods are compared with, and of the methods by name.
    """
    execution = {"backend": "inline"}
    first, methods = compared
    for name, sections in methods.items():
        with ExitStack() as stack:
            # Two identical drivers differ at random by a tenth on W1. A single one for all methods would
            # shift all figures.
            base = stack.enter_context(running(replace(workload, sections=first), folder, execution))
            try:
                method = stack.enter_context(running(replace(workload, sections=sections), folder, execution))
            except ConfigError:  # such as Per-FedAvg with momentum, or Sub-FedAvg with one epoch
                continue
            _warm_up(base, workload.clients)
            _warm_up(method, workload.clients)
            turns, base_turns = _in_turns(method, base, rounds)
        yield name, turns, base_turns


def _in_turns(method: Rayfl, base: Rayfl, rounds: int) -> tuple[list[Turn], list[Turn]]:
    """Rounds of both in pairs; who is first in a pair alternates, as what runs before leaves its data in the
    caches.
    """
    turns: list[Turn] = []
    base_turns: list[Turn] = []
    both = [(method, turns), (base, base_turns)]
    for _ in range(rounds):
        for rayfl, measured in both:
            measured.append(_turn(rayfl))
        both.reverse()
    return turns, base_turns


def _warm_up(rayfl: Rayfl, clients: int) -> None:
    """Run rounds until a further one costs what all later ones will."""
    for _ in range(WARM_UP):
        rayfl.round()
    while 0 < rayfl.keeping < SETTLED * clients:
        rayfl.round()


def _turn(rayfl: Rayfl) -> Turn:
    """Measure the next round."""
    begun = time.process_time()
    rayfl.round()
    return Turn(time.process_time() - begun, rayfl.trained[-1])
