"""A run's numbers as metrics of Ray, which every node offers to Prometheus (``ray metrics`` explains how).

Ray puts ``ray_`` before the names, and ``_total`` behind those of counters: ``ray_rayfl_rounds_total``. All
have the labels ``Run`` and ``Method`` besides Ray's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayfl.config import Config
from rayfl.monitor import Status
from rayfl.monitor.writer import Export

COUNTERS = {
    "rayfl_rounds": "Rounds that are complete, since the run began or went on.",
    "rayfl_clients": "Clients that were trained.",
    "rayfl_client_steps": "Local optimizer steps of all clients.",
    "rayfl_client_failures": "Clients that failed.",
    "rayfl_bytes": "Bytes sent between clients, LPSs and GPS, by Tier and Direction.",
}
"""What only grows, and what it is."""

GAUGES = {
    "rayfl_rounds_done": "Rounds that are complete, since the beginning.",
    "rayfl_rounds_planned": "Rounds that are to be run.",
    "rayfl_round_seconds": "Seconds of the last round.",
    "rayfl_remaining_seconds": "Seconds until the end, by the last rounds.",
    "rayfl_client_steps_per_second": "Local optimizer steps of all clients a second, in the last round.",
    "rayfl_waiting_ratio": "Share of the client actors' time in which they did not train, in the last round.",
    "rayfl_blocks_left": "Blocks of the current round that are not trained yet.",
    "rayfl_actors": "Client actors that are there.",
    "rayfl_actors_busy": "Client actors that have work.",
    "rayfl_slowest_actor_seconds": "Seconds that the slowest client actor trained in the last round.",
    "rayfl_driver_memory_bytes": "Memory of the driver.",
    "rayfl_worker_memory_bytes": "Memory of the client actors together.",
    "rayfl_train_loss": "Mean training loss of the last round.",
    "rayfl_test_loss": "Mean test loss over clients, of the last test.",
    "rayfl_accuracy_mean": "Mean test accuracy over clients in percent, of the last test.",
    "rayfl_accuracy_worst10": "Mean test accuracy of the worst tenth of clients in percent, last test.",
}
"""What goes up and down, and what it is."""


def exports(config: Config) -> list[Export]:
    """Where the status of a run goes besides its directory."""
    return [RayMetrics(config.algorithm.name)] if config.execution.backend == "ray" else []


class RayMetrics:
    """Tells Ray of a run. Whoever calls it knows what to do with an error."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._metrics: dict[str, Any] = {}
        self._before: dict[tuple[str, str], float] = {}

    def __call__(self, status: Status) -> None:
        """Take a status of the run; where Ray is not connected yet, or any more, nothing happens."""
        import ray

        if not ray.is_initialized():
            return
        if not self._metrics:
            self._open()
        tags = {"Run": status.run, "Method": self._method}
        for name, value in gauges(status).items():
            if value is not None:
                self._metrics[name].set(float(value), tags=tags)
        for name, value in counts(status).items():
            self._count(name, value, tags)
        for key, value in status.traffic.items():
            tier, _, direction = key.rpartition("_")
            self._count("rayfl_bytes", value, {**tags, "Tier": tier, "Direction": direction})

    def _open(self) -> None:
        from ray.util.metrics import Counter, Gauge

        keys = ("Run", "Method")
        for name, about in GAUGES.items():
            self._metrics[name] = Gauge(name, about, tag_keys=keys)
        for name, about in COUNTERS.items():
            more = ("Tier", "Direction") if name == "rayfl_bytes" else ()
            self._metrics[name] = Counter(name, about, tag_keys=(*keys, *more))

    def _count(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        """Have a counter stand at this value."""
        key = name, "/".join(tags.values())
        more = value - self._before.get(key, 0.0)
        if more > 0:
            self._metrics[name].inc(more, tags=dict(tags))
            self._before[key] = value


def counts(status: Status) -> dict[str, float]:
    """The values of the counters that have no further labels."""
    return {
        "rayfl_rounds": status.rounds_run,
        "rayfl_clients": status.clients,
        "rayfl_client_steps": status.steps,
        "rayfl_client_failures": status.failures,
    }


def gauges(status: Status) -> dict[str, float | None]:
    """The values of the gauges; None for what is not known."""
    return {
        "rayfl_rounds_done": status.done,
        "rayfl_rounds_planned": status.rounds,
        "rayfl_round_seconds": status.round_seconds,
        "rayfl_remaining_seconds": status.remaining if status.active else 0.0,
        "rayfl_client_steps_per_second": status.steps_per_second if status.active else 0.0,
        "rayfl_waiting_ratio": status.waiting,
        "rayfl_blocks_left": status.blocks - status.blocks_done if status.active else 0,
        "rayfl_actors": status.actors_present if status.active else 0,
        "rayfl_actors_busy": status.actors_busy,
        "rayfl_slowest_actor_seconds": None if status.slowest is None else status.slowest.seconds,
        "rayfl_driver_memory_bytes": status.driver_memory,
        "rayfl_worker_memory_bytes": status.worker_memory,
        "rayfl_train_loss": status.train_loss,
        "rayfl_test_loss": status.loss_mean,
        "rayfl_accuracy_mean": status.accuracy_mean,
        "rayfl_accuracy_worst10": status.accuracy_worst10,
    }
