"""A run's numbers as Ray's metrics, and the dashboard that shows them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from rayfl.api import run
from rayfl.monitor import Status
from rayfl.runtime.metrics import COUNTERS, GAUGES, RayMetrics, counts, exports, gauges

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "monitoring" / "grafana-rayfl.json"
EXPORTED = {f"ray_{name}" for name in GAUGES} | {f"ray_{name}_total" for name in COUNTERS}


class Metric:
    """What was told of a counter or gauge, by tags."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self.values[str(tags)] = self.values.get(str(tags), 0.0) + value

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[str(tags)] = value


def test_every_metric_has_a_value_and_counters_only_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counts(Status("r", "running")).keys() | {"rayfl_bytes"} == COUNTERS.keys()
    assert gauges(Status("r", "running")).keys() == GAUGES.keys()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    metrics = RayMetrics("fedavg")
    metrics._metrics = {name: Metric() for name in (*COUNTERS, *GAUGES)}
    for steps, sent in ((10, 4), (10, 4), (25, 4)):
        metrics(
            Status("r", "running", steps=steps, traffic={"client_lps_up": sent, "lps_gps_down": 2 * sent})
        )
    tags = {"Run": "r", "Method": "fedavg"}
    assert metrics._metrics["rayfl_client_steps"].values == {str(tags): 25}
    assert metrics._metrics["rayfl_bytes"].values == {
        str({**tags, "Tier": "client_lps", "Direction": "up"}): 4,
        str({**tags, "Tier": "lps_gps", "Direction": "down"}): 8,
    }
    assert metrics._metrics["rayfl_accuracy_mean"].values == {}


def test_without_ray_nothing_happens(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    metrics = RayMetrics("fedavg")
    metrics(Status("r", "running"))
    assert metrics._metrics == {}
    assert exports(run(settings).config) == []


SCRIPT = """
import json, sys, time, urllib.request
import psutil, ray
from rayfl import api
from rayfl.runtime.connection import _without_cluster_processes

with _without_cluster_processes():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
             _system_config={"metrics_report_interval_ms": 500})
settings = json.loads(sys.argv[1])
path = api.run(settings).path
node = ray.nodes()[0]
url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
until = time.monotonic() + 120
text = ""
while time.monotonic() < until and 'ray_rayfl_rounds_total' not in text:
    time.sleep(0.5)
    text = urllib.request.urlopen(url, timeout=20).read().decode()
while time.monotonic() < until:
    lines = [line for line in text.splitlines() if line.startswith("ray_rayfl_rounds_total{")]
    if lines and float(lines[0].split()[-1]) == 3:
        break
    time.sleep(0.5)
    text = urllib.request.urlopen(url, timeout=20).read().decode()
commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
print(json.dumps([path.name, text, commands]))
"""


@pytest.mark.ray
@pytest.mark.slow
def test_prometheus_finds_them_at_the_endpoint_of_the_node(settings: dict[str, Any]) -> None:
    """In a process of its own: Ray reports every ten seconds unless it is told otherwise when it starts.

    It starts without the processes that only clusters need.
    """
    settings["execution"] = {"backend": "ray", "actors": 1, "cpus_per_actor": 0.5, "block_size": 3}
    command = [sys.executable, "-c", SCRIPT, json.dumps(settings)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    name, text, commands = json.loads(found.stdout.splitlines()[-1])
    assert any("dashboard/agent.py" in command for command in commands)
    for other in ("monitor.py", "dashboard/dashboard.py"):
        assert not any(other in command for command in commands), other
    lines = [line for line in text.splitlines() if line.startswith("ray_rayfl_")]
    assert {line.partition("{")[0] for line in lines} >= EXPORTED - {"ray_rayfl_client_failures_total"}
    assert all(f'Run="{name}"' in line and 'Method="fedavg"' in line for line in lines)
    (clients,) = [line for line in lines if line.startswith("ray_rayfl_clients_total{")]
    assert float(clients.split()[-1]) == 27


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    found = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in found["panels"] for target in panel.get("targets", ())]
    named = {name for query in asked for name in re.findall(r"\bray_rayfl_\w+", query)}
    assert named == EXPORTED
    assert all('Run=~"$run"' in query for query in asked if "ray_rayfl" in query)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in found["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])
