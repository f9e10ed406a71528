"""``rayfl bench CONFIG``."""

import io
import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from rich.console import Console

from rayfl.bench import command, measure, naive, startup
from rayfl.bench.own import OwnWorkload
from rayfl.config import kinds, load
from rayfl.errors import ConfigError
from rayfl.servers.building import divide

CONFIG = "digits-demo"
OVERRIDES = [
    "training.epochs=1",
    "training.lr=1e-30",
    "training.participation=0.5",
    "execution.backend=inline",
]


@pytest.fixture(scope="module")
def own() -> OwnWorkload:
    return OwnWorkload.of(CONFIG, OVERRIDES)


def test_the_plain_loop_has_the_clients_and_the_work_of_the_config(own):
    config = load(CONFIG, OVERRIDES)
    federation = divide(config)[0][0].federation
    assert own.clients == federation.clients
    assert own.cohort == config.training.cohort(own.clients)
    assert own.training["lr"] == config.training.lr
    read = own.reader()
    for client in (0, own.clients - 1):
        x, y = read(client)
        assert x.shape == (federation.sizes[client], *federation.samples.shape)
        np.testing.assert_array_equal(y, federation.samples.labels("train", federation.train[client]))


def test_it_travels_as_json(own):
    assert OwnWorkload(**json.loads(json.dumps(asdict(own)))) == own


class Pipe:
    """What a worker is told, and what it answered."""

    def __init__(self, *told):
        self.told, self.answers = [*told, None], []

    def recv(self):
        return self.told.pop(0)

    def send(self, answer):
        self.answers.append(answer)


def test_a_worker_weighs_clients_by_their_samples(own):
    """With a vanishing learning rate every client returns the model that it was sent."""
    torch.manual_seed(0)
    state = own.network().state_dict()
    pipe = Pipe((state, [0, 3]))
    threads = torch.get_num_threads()
    try:
        naive._work(own, pipe)
    finally:
        torch.set_num_threads(threads)
    (ready, (total, samples)) = pipe.answers
    assert ready == "ready"
    assert samples == sum(len(own.reader()(client)[0]) for client in (0, 3))
    for name, value in state.items():
        torch.testing.assert_close(total[name] / samples, value)


def test_rayfl_runs_the_config_without_an_end(own, tmp_path):
    config = own.config(tmp_path)
    given = load(CONFIG, OVERRIDES)
    assert config.training == given.training
    assert config.algorithm == given.algorithm
    assert config.output.root == tmp_path
    with measure.running(own, tmp_path, {}) as rayfl:
        assert rayfl.round() > 0
        assert rayfl.round() > 0


def test_the_table_fits_into_80_columns(monkeypatch, own):
    row = {
        "workload": own.name, "plain_seconds": 1234.5, "rayfl_seconds": 0.0403, "ratio": 10.4,
        "memory_gb": 0.951, "plain_memory_gb": 0.951, "engine": "batched",
    }  # fmt: skip
    monkeypatch.setattr(measure, "measure", lambda *_: dict(row))
    monkeypatch.setattr(
        startup, "own_first_rounds", lambda *_: {"plain_startup": 3.25, "rayfl_startup": 18.75}
    )
    text = io.StringIO()
    found = command.bench([CONFIG, *OVERRIDES], 1, None, Console(file=text, width=80, color_system=None))
    printed = text.getvalue()
    assert "…" not in printed
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 80
    assert found["own"][0]["rayfl_startup"] == 18.75


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (["W9"], "no benchmark, preset or file named 'W9'"),
        (["training.lr=0.1"], "training.lr=0.1 is a setting, and no config is named"),
        (["W1", CONFIG], "cannot be measured together"),
        ([CONFIG, "training.lrr=1"], "lrr"),
    ],
)
def test_mistakes_are_said_before_anything_starts(tasks, said):
    with pytest.raises(ConfigError, match=said) as error:
        command.bench(tasks, 1, None, Console(file=io.StringIO()))
    assert "\n" not in str(error.value)


OWN = """
from typing import Literal

from rayfl.algorithms.fedavg import FedAvg


class Mine(FedAvg):
    name: Literal["mine_in_a_bench"] = "mine_in_a_bench"
"""


def test_the_other_processes_know_the_plug_ins(tmp_path, forgotten_parts):
    file = tmp_path / "mine_in_a_bench.py"
    file.write_text(OWN)
    kinds.bring([str(file)])
    own = OwnWorkload.of(CONFIG, [*OVERRIDES, "algorithm=mine_in_a_bench"])
    code = f"from rayfl.config import load; print(load({own.given!r}, {own.overrides!r}).algorithm.name)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert found.stdout == "mine_in_a_bench\n", found.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rounds=5", "rounds: has no effect in a benchmark; use --rounds"),
        ("evaluation.every=2", "evaluation.every: has no effect in a benchmark; leave it out"),
        ("output.root=there", "output.root: has no effect in a benchmark; leave it out"),
    ],
)
def test_settings_that_a_benchmark_sets_itself_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        OwnWorkload.of(CONFIG, [*OVERRIDES, override])
