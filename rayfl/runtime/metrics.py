"""The metrics of a run, as Ray metrics that every node exports to Prometheus.

Ray adds the prefix ``ray_``, and for counters the suffix ``_total``: ``ray_rayfl_rounds_total``. All metrics
have the labels ``Run`` and ``Method`` in addition to Ray's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayfl.config import Config
from rayfl.monitor import Status
from rayfl.monitor.writer import Export

COUNTERS = {
    "rayfl_rounds": "Complete rounds since the run started or was resumed.",
    "rayfl_clients": "Clients trained.",
    "rayfl_client_steps": "Local optimizer steps of all clients.",
    "rayfl_client_failures": "Clients that failed.",
    "rayfl_bytes": "Bytes sent between clients, LPSs and GPS, by Tier and Direction.",
}
"""Counters and their descriptions."""

GAUGES = {
    "rayfl_rounds_done": "Complete rounds of the whole run.",
    "rayfl_rounds_planned": "Planned rounds.",
    "rayfl_round_seconds": "Seconds of the last round.",
    "rayfl_remaining_seconds": "Estimated seconds until the end, from the last rounds.",
    "rayfl_client_steps_per_second": "Local optimizer steps of all clients per second, in the last round.",
    "rayfl_waiting_ratio": "Share of the client actors' time in which they did not train, in the last round.",
    "rayfl_blocks_left": "Blocks of the current round that have not been trained yet.",
    "rayfl_actors": "Client actors present.",
    "rayfl_actors_busy": "Client actors that have work.",
    "rayfl_slowest_actor_seconds": "Seconds that the slowest client actor trained in the last round.",
    "rayfl_driver_memory_bytes": "Memory of the driver.",
    "rayfl_worker_memory_bytes": "Memory of the client actors together.",
    "rayfl_train_loss": "Mean training loss of the last round.",
    "rayfl_test_loss": "Mean test loss over clients, of the last test.",
    "rayfl_accuracy_mean": "Mean test accuracy over clients in percent, of the last test.",
    "rayfl_accuracy_worst10": "Mean test accuracy of the worst 10 % of clients in percent, of the last test.",
}
"""Gauges and their descriptions."""


def exports(config: Config) -> list[Export]:
    """Where the status of a run is exported to, besides its directory."""
    return [RayMetrics(config.algorithm.name)] if config.execution.backend == "ray" else []


class RayMetrics:
    """Exports the status of a run to Ray; callers handle errors."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._metrics: dict[str, Any] = {}
        self._last_values: dict[tuple[str, str], float] = {}

    def __call__(self, status: Status) -> None:
        """Export a status of the run; does nothing while Ray is not connected."""
        import ray

        if not ray.is_initialized():
            return
        if not self._metrics:
            self._create_metrics()
        tags = {"Run": status.run, "Method": self._method}
        for name, value in gauges(status).items():
            if value is not None:
                self._metrics[name].set(float(value), tags=tags)
        for name, value in counts(status).items():
            self._raise_counter(name, value, tags)
        for key, value in status.traffic.items():
            tier, _, direction = key.rpartition("_")
            self._raise_counter("rayfl_bytes", value, {**tags, "Tier": tier, "Direction": direction})

    def _create_metrics(self) -> None:
        from ray.util.metrics import Counter, Gauge

        keys = ("Run", "Method")
        for name, description in GAUGES.items():
            self._metrics[name] = Gauge(name, description, tag_keys=keys)
        for name, description in COUNTERS.items():
            further_keys = ("Tier", "Direction") if name == "rayfl_bytes" else ()
            self._metrics[name] = Counter(name, description, tag_keys=(*keys, *further_keys))

    def _raise_counter(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        """Raise a counter to this value."""
        key = name, "/".join(tags.values())
        increase = value - self._last_values.get(key, 0.0)
        if increase > 0:
            self._metrics[name].inc(increase, tags=dict(tags))
            self._last_values[key] = value


def counts(status: Status) -> dict[str, float]:
    """The values of the counters that have no further labels."""
    return {
        "rayfl_rounds": status.rounds_run,
        "rayfl_clients": status.clients,
        "rayfl_client_steps": status.steps,
        "rayfl_client_failures": status.failures,
    }


def gauges(status: Status) -> dict[str, float | None]:
    """The values of the gauges; None if unknown."""
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
