"""Client actors that share a real GPU, on a Ray that rayfl starts: the same bits on any number of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rayfl.api import Result
from tests.runs import METHODS, TASKS, assert_same

pytestmark = [
    pytest.mark.ray,
    pytest.mark.ray_apart,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CASES: dict[str, dict[str, Any]] = {
    "ifca": {"evaluation": {"local": True, "every": 1}, **METHODS["ifca"]},
    "scaffold": {"algorithm": "pacfl", **METHODS["pacfl, scaffold"]},
    "dropout": {"algorithm": "fedavg", "model": {"name": "mlp", "hidden": [16], "dropout": 0.5}},
}

Start = Callable[..., Path]
Watch = Callable[["subprocess.Popen[bytes]", Path], None]


def without_ray() -> dict[str, str]:
    """This environment, in which rayfl starts a Ray of its own."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """``start("ifca", "rounds=4")`` runs a case in a process of its own and returns the run's directory."""

    def call(case: str, *settings: str, watch: Watch | None = None) -> Path:
        folder = tmp_path_factory.mktemp(case)
        config = {
            "name": "t", "rounds": 4, "seed": 3, "algorithm": case,
            "partition": {"name": "tasks", "tasks": TASKS, "foreign": 0.05},
            "model": {"name": "mlp", "hidden": [16]},
            "training": {"epochs": 2, "batch_size": 10, "lr": 0.05},
            **CASES[case],
            "execution": {"block_size": 2, "device": "cuda", "gpus_per_actor": 0.25},
            "output": {
                "root": str(folder / "runs"), "report": False, "tensorboard": False, "checkpoint_every": 1,
            },
        }  # fmt: skip
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "rayfl", "run", str(file), *settings]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=without_ray())
            try:
                if watch is not None:
                    watch(process, folder / "runs")
                code = process.wait()
            finally:
                process.kill()  # where the test is over its time
        assert code == 0, (folder / "output").read_text()
        (directory,) = (folder / "runs").iterdir()
        return directory

    return call


@pytest.fixture(scope="module")
def alone(start: Start) -> Callable[[str], Result]:
    """The result of a case in one process, computed once."""
    known: dict[str, Result] = {}

    def call(case: str) -> Result:
        if case not in known:
            known[case] = Result(start(case, "execution.backend=inline"))
        return known[case]

    return call


@pytest.mark.parametrize(
    "settings",
    [
        ("execution.actors=1", "execution.gpus_per_actor=1"),
        ("execution.actors=2", "execution.gpus_per_actor=0.5"),
        ("execution.actors=4",),
        ("execution.gpus_per_actor=auto",),
    ],
    ids=["whole", "halves", "quarters", "auto"],
)
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_on_any_number_of_actors(
    case: str, settings: tuple[str, ...], start: Start, alone: Callable[[str], Result]
) -> None:
    directory = start(case, *settings)
    assert_same(Result(directory), alone(case))
    assert "batched on cuda with graphs" in (directory / "log.jsonl").read_text()


def test_a_run_that_is_continued_has_the_same_bits(start: Start, alone: Callable[[str], Result]) -> None:
    """Its second half has other processes and newly recorded steps, and one actor in place of two."""
    directory = start("scaffold", "execution.actors=2", "rounds=2")
    command = [sys.executable, "-m", "rayfl", "resume", str(directory), "rounds=4", "execution.actors=1"]
    done = subprocess.run(command, env=without_ray(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(Result(directory), alone("scaffold"))


def test_a_killed_actor_changes_no_bit(start: Start, alone: Callable[[str], Result]) -> None:
    import psutil

    killed = []

    def kill(process: subprocess.Popen[bytes], runs: Path) -> None:
        while not killed and process.poll() is None:
            time.sleep(0.02)
            if not any(runs.glob("*/checkpoints/*")):
                continue
            for child in psutil.Process(process.pid).children(recursive=True):
                if "_HostActor" in " ".join(child.cmdline()):
                    child.kill()
                    killed.append(child.pid)
                    break

    directory = start("ifca", "execution.actors=2", watch=kill)
    assert killed
    assert_same(Result(directory), alone("ifca"))
