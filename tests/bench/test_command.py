"""``rayfl bench`` as it is called: names, tables, the file of figures."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rayfl.bench import command, measure, startup
from rayfl.bench.saved import Rows
from rayfl.bench.workloads import WORKLOADS
from rayfl.cli import app
from rayfl.errors import ConfigError

TINY = {
    "W1": dataclasses.replace(WORKLOADS["W1"], clients=12, samples=7, cohort=6, shape=(1, 4, 4), classes=3),
}

SPEED = {
    "workload": "W1", "plain_seconds": 1234.5, "rayfl_seconds": 0.0403, "ratio": 10.4, "utilisation": 0.123,
    "rayfl_steps_per_second": 123_456.0, "memory_gb": 0.951, "plain_memory_gb": 0.951, "engine": "batched",
}  # fmt: skip

CLUSTERS = {
    "clients": 100_000, "way": "two-stage", "seconds": 123.4, "peak_gb": 12.3, "double_loop_seconds": 1e7,
    "ari": 0.123, "representatives": 10_000, "agreement": 0.999, "n_clusters": 20, "signatures_gb": 0.94,
}  # fmt: skip

POPULATION = {
    "clients": 1_000_000, "cohort": 10_000, "tested every": 10, "start_cpu": 12.3, "checkpoint_cpu": 0.123,
    "driver_cpu": 0.0123, "client actors_cpu": 0.123, "driver_percent": 12.3, "round_seconds": 0.123,
    "memory_gb": 1.23,
}  # fmt: skip


def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part answers at once."""
    monkeypatch.setattr(measure, "measure", lambda workload, *_: {**SPEED, "workload": workload.name})
    monkeypatch.setattr(startup, "_cpu_seconds", lambda arguments, tries: 0.75)
    monkeypatch.setattr(
        startup, "_in_new_process", lambda workload, *_: {"imports": 1.25, "first round": 2.0}
    )
    monkeypatch.setattr(command.cluster, "run", lambda: [CLUSTERS])
    monkeypatch.setattr(command.population, "run", lambda: [POPULATION])


def test_tables_fit_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    text = io.StringIO()
    console = Console(file=text, width=80, color_system=None)
    command.bench(["W1", "W3", "startup", "cluster", "population"], 1, None, console)
    printed = text.getvalue()
    assert "…" not in printed  # how Rich cuts what does not fit
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 80
    for word in (
        "s/round",
        "faster",
        "steps/s",
        "batched",
        "1,234",
        "123,456",
        "10.4",
        "3.25",
        "0.75",
        "two-stage",
    ):
        assert word in printed, word
    assert "100,000" in printed
    assert "10,000,000" in printed


def test_all_workloads_if_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch)
    out = tmp_path / "figures.json"
    done = CliRunner().invoke(app, ["bench", "--json", str(out)])
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    assert [row["workload"] for row in written["workloads"]] == ["W1", "W2", "W3"]
    assert {"machine", "versions"} < set(written)
    assert "cluster" not in written


def test_an_unknown_name_is_refused_in_a_line() -> None:
    done = CliRunner().invoke(app, ["bench", "W9"])
    assert done.exit_code != 0
    text = f"{done.output}{done.exception or ''}"
    assert "no benchmark, preset or file named 'W9'" in text
    assert "valid: W1, W2, W3" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "tpu"], "--device: got 'tpu'; expected cpu or cuda"),
        (["--device", "cuda"], "--device: no CUDA device here"),
        (["--device", "cuda", "W1", "startup"], "--device: startup is measured on the CPU"),
        (["networks", "--precision", "fp16"], "--precision: got 'fp16'; expected float32 or bf16"),
        (["W1", "--precision", "bf16"], "--precision: is only for the benchmark networks"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_a_line(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    assert text in str(caught.value)


@pytest.mark.parametrize("where", ["device=cuda", "gpus_per_actor=0.5"])
def test_a_config_for_a_gpu_is_not_compared_with_a_loop_on_the_cpu(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(startup, "own_first_rounds", lambda *_: {})
    tasks, console = ["digits-demo", f"execution.{where}"], Console(file=io.StringIO())
    with pytest.raises(ConfigError, match="--device: digits-demo trains on a GPU; use --device=cuda"):
        command.bench(tasks, 1, None, console)
    for device, more in (("cuda", []), ("cpu", ["execution.device=cpu"])):
        assert command.bench([*tasks, *more], 1, None, console, device)["own"]


def test_figures_of_another_device_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, console, known = tmp_path / "figures.json", Console(quiet=True), list[int]()

    def stopped(*_: object, saved: Rows, **__: object) -> None:
        known.append(len(saved.known))
        saved.keep([{"network": "skip"}])
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(command.networks, "run", stopped)
    for device in ("cpu", "cpu", "cuda", "cuda"):
        with pytest.raises(KeyboardInterrupt):
            command.bench(["networks"], 1, out, console, device)
    assert known == [0, 1, 0, 1]


def test_on_a_gpu_all_networks_are_measured_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch)
    devices = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(
        measure, "measure", lambda *given: devices.append(given[-1]) or {**SPEED, "workload": given[0].name}
    )
    monkeypatch.setattr(command.networks, "run", lambda *_, device, **__: devices.append(device) or [])
    command.bench([], 1, None, Console(file=io.StringIO()), "cuda")
    assert devices == ["cuda"] * 4


@pytest.mark.slow
def test_a_tiny_workload_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For real, with rayfl in this process."""
    monkeypatch.setattr(command, "WORKLOADS", TINY)
    real = measure.measure

    @functools.wraps(real)
    def inline(
        workload: Any, rounds: int, execution: dict[str, Any], say: Any, device: str
    ) -> dict[str, Any]:
        return real(workload, rounds, {"backend": "inline"}, say)

    monkeypatch.setattr(measure, "measure", inline)
    out = tmp_path / "figures.json"
    done = CliRunner().invoke(app, ["bench", "W1", "--rounds", "2", "--json", str(out)])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(out.read_text())["workloads"]
    steps = 6 * 5 * 1  # clients, epochs, batches of 10 for 7 samples
    assert row["client_steps_a_round"] == steps
    assert row["rayfl_steps_per_second"] == pytest.approx(steps / row["rayfl_seconds"])
    assert row["plain_steps_per_second"] == pytest.approx(steps / row["plain_seconds"])
    assert len(row["ratios"]) == 2
    assert all(math.isfinite(r) and r > 0 for r in row["ratios"])
    assert 0 < row["utilisation"] <= 1
    assert row["memory_gb"] is not None
